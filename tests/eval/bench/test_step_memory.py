"""Tests how the peak memory of a step is measured."""

import torch

from eval.bench.step_memory import tensor_bytes

CPU = torch.device("cpu")
MEGABYTES = 50


def filled() -> torch.Tensor:
    return torch.ones(MEGABYTES, 1_000_000, dtype=torch.uint8)


def test_tensors_that_are_alive_together_are_added_up() -> None:
    assert tensor_bytes(lambda: (filled(), filled()), CPU) == 2 * MEGABYTES * 1_000_000


def test_consecutive_tensors_are_not() -> None:
    kept = filled()

    def step() -> None:
        filled()
        kept.add_(1)
        filled()

    assert MEGABYTES * 1_000_000 <= tensor_bytes(step, CPU) < 1.01 * MEGABYTES * 1_000_000
