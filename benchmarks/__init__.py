"""Benchmarks, and the programs that made the demo target and some training data. They are not installed."""
