"""Train, measure and export speculative-decoding draft heads for a frozen target."""

import os

# OpenMP reads this when torch is loaded. By default a waiting OpenMP thread spins for milliseconds; when other programs
# run, it may hold the core that the thread it waits for needs. docs/performance.md has measurements.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for its accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
