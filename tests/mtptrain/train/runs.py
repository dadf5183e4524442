"""Trains a run with the program, and reads the metrics that it records."""

import json
from pathlib import Path

from tests.conftest import Run, run_program

FP32 = "deepspeed.bf16.enabled=false"
FOUR_MICRO_BATCHES = "train.micro_batches_per_step=4"


def train(run: Run, *overrides: str, num_ranks: int = 1) -> list[dict[str, object]]:
    """Train, and return the records of metrics.jsonl that hold a loss."""
    run_dir, settings = run
    result = run_program("train", *settings, *overrides, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return records(run_dir)


def records(run_dir: Path) -> list[dict[str, object]]:
    """Returns the records that hold a loss, without a last line that a running program has not finished writing."""
    path = run_dir / "train" / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def figures(found: list[dict[str, object]]) -> list[list[float]]:
    """Returns the loss, the KL divergence at each depth and the gradient norm of each record."""
    return [[record["loss"], *record["kl_at"], record["grad_norm"]] for record in found]  # type: ignore[misc]
