"""Benchmarks: every candidate is measured in turns in one run."""
