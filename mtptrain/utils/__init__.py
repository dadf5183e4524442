"""Ranks, clocks, compiled functions and files."""
