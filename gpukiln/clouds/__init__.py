"""The clouds that images are built on."""
