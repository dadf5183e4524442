"""Tests the benchmark of the training step. Speed is not tested."""

import json

import pytest
import torch

from benchmarks.command import tensor_bytes
from tests.conftest import succeed


@pytest.mark.slow
def test_every_case_is_measured() -> None:
    sizes = ["--hidden-sizes", "64", "--tokens", "96", "--longest-tokens", "8192", "--repeats", "1"]
    result = succeed("benchmarks.training_step", *sizes)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["tokens"], row["supervised"]) for row in rows] == [
        *((96, 96), (2000, 200), (512, 512), (5120, 512), (1024, 1024)),
        *((2048, 1024), (2048, 2048), (4096, 1024), (8192, 1024)),
    ]
    assert all(row["tokens_per_s"] > 0 and row["megabytes"] > 0 for row in rows)
    assert "A prompt token takes" in result.stdout and "matmul peak" in result.stdout


def test_only_tensors_that_are_alive_together_add_up() -> None:
    size, cpu = 50_000_000, torch.device("cpu")
    kept = torch.ones(size, dtype=torch.uint8)

    def one_after_the_other() -> None:
        for _ in range(2):
            torch.ones_like(kept)

    assert tensor_bytes(lambda: (torch.ones_like(kept), torch.ones_like(kept)), cpu) == 2 * size
    assert size <= tensor_bytes(one_after_the_other, cpu) < 1.01 * size
