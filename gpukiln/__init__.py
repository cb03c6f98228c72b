"""Bakes GPU machine images, proves them on a machine booted from them, releases only what was proven."""

__version__ = "0.2.0"
