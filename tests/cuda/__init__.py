"""Rehearsals of what runs on GPUs, on fake CUDA tensors: devices, dtypes, operator schemas and host syncs are real."""
