"""Runs vLLM in a process of its own, and compares its answers with ours."""
