"""Benchmarks. In each one, all candidates take turns within one run, except vLLM in the extraction benchmark."""
