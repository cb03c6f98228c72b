"""Container images: plan, build, verify, push."""
