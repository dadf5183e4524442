"""Provides the run with which runs on other ranks, in other precisions and after interruptions are compared."""

from dataclasses import dataclass

import pytest

from tests.conftest import Run
from tests.mtptrain.train.runs import PLAIN_STEPS, Record, copy_of, train


@dataclass(frozen=True)
class Reference:
    """A finished run. Tests change only copies of its folder."""

    run: Run
    records: list[Record]


@pytest.fixture(scope="session")
def reference(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Trains twelve steps of four micro-batches, with one rank, ZeRO 0 and fp32, and measures three times."""
    directory = tmp_path_factory.mktemp("reference")
    run = copy_of((tiny_run[0], ("run_dir", *tiny_run[1], *PLAIN_STEPS, "deepspeed=zero0")), directory)
    often = ("train.validation_prompts=4", "train.save_every=4", "train.validate_every=4", "train.keep_checkpoints=2")
    return Reference(run, train(run, *often))
