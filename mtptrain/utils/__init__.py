"""Ranks, clocks, CPU features, compiled functions, files, errors and bounds of settings."""
