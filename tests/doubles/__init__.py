"""Doubles of what a test can't have: libraries that programs load as they are."""
