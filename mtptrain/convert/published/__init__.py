"""Reads heads that others published, and our own exports."""
