"""Rehearsals of what runs on GPUs, on fake CUDA tensors: devices, dtypes, operator schemas, host syncs, memory and
FLOPs are real."""
