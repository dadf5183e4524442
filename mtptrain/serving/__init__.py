"""Runs vLLM as a separate process or server, and compares its output with ours."""
