"""Measures the speed of engines for `eval.serving_bench`."""
