"""Estimates the resources of a run before anything is loaded."""
