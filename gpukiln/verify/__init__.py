"""Runs the host suite on a machine and makes the report."""
