"""An image's way: plan, bake, record, release."""
