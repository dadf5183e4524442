"""Benchmarks. Each one measures all its candidates in turns, in one run."""
