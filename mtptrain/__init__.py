"""Train, measure and export speculative-decoding draft heads for a frozen target."""

import os

# OpenMP reads this when torch is loaded. By default a thread that waits for another one keeps its core busy for
# milliseconds, which the other one may need when further programs run. docs/performance.md has measurements.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for its accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
