"""Trains a run with the program, reads what it records, and asks why training refuses it."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from mtptrain import run_dir as run_module
from mtptrain.train import prepare
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import Run, make_config, succeed
from tests.programs import StartedProgram, wait_until

FP32 = "deepspeed.bf16.enabled=false"
PLAIN_STEPS = ("train.micro_batches_per_step=4", "train.max_steps=12", "train.validation_prompts=0")
"""Settings of a run whose steps are those of the fixture `reference`, without its checkpoints and measurements."""
Record = dict[str, Any]


def train(run: Run, *overrides: str, num_ranks: int = 1) -> list[Record]:
    """Train, and return the records of metrics.jsonl that hold a loss."""
    run_dir, settings = run
    succeed("train", *settings, *overrides, num_ranks=num_ranks)
    return records(run_dir)


def records(run_dir: Path) -> list[Record]:
    """Returns the records that hold a loss, without a last line that a running program has not finished writing."""
    path = run_dir / "train" / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def figures(found: list[Record]) -> list[list[float]]:
    """Returns the loss, the KL divergence at each depth and the gradient norm of each record."""
    return [[record["loss"], *record["kl_at"], record["grad_norm"]] for record in found]


def assert_close(found: list[Record], wanted: list[Record], tolerance: float = 1e-5) -> None:
    """Compares the figures of all steps."""
    for ours, theirs in zip(figures(found), figures(wanted), strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance, rel=tolerance)


def head_bytes(run: Run) -> bytes:
    return (run[0] / "train/last/head.safetensors").read_bytes()


def copy_of(run: Run, directory: Path) -> Run:
    """Returns a copy of a run whose overrides begin with `run_dir`, as those of `fresh_run` do."""
    shutil.copytree(run[0], directory / "run")
    return directory / "run", (f"run_dir={directory}/run", *run[1][1:])


def wait_for_records(program: StartedProgram, run: Run, count: int) -> None:
    wait_until(lambda: len(records(run[0])) >= count, program)


def refused(run: Run, *overrides: str, num_ranks: int = 1) -> str:
    """Returns why training refuses a run before it builds an engine."""
    with pytest.raises(UserError) as found:
        prepare(run_module.Run(make_config(*run[1], *overrides)), Ranks(0, num_ranks, 0), cast(Any, None))
    return str(found.value)
