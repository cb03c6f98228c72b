"""Bakes GPU machine images, verifies them on a machine booted from them, releases only verified images."""

__version__ = "0.2.0"
