"""Workers that run in the Python of another trainer."""
