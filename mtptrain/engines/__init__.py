"""Serving engines, each in a Python of its own: what starts them, asks them and reads their counters."""
