"""Train, measure and export speculative-decoding draft heads for a frozen target."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # before any import of DeepSpeed, which looks for its accelerator then
