"""Measures the speed of engines for `mtptrain serving-bench`."""
