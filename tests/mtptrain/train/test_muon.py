"""Tests that training with Muon does not depend on ranks or ZeRO, and resumes to the last digit."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Run, tiers
from tests.mtptrain.train.runs import FP32, copy_of, train

MUON = ("train.optimizer=muon", "train.validation_prompts=0", "train.validate_every=0", "train.max_steps=8")


def losses(run: Run, directory: Path, *overrides: str, num_ranks: int = 1) -> list[float]:
    """Trains in a folder that has the run's hidden states, and returns the losses of all steps."""
    if not directory.exists():
        copy_of((run[0], ()), directory)
    found = train((directory / "run", run[1]), f"run_dir={directory}/run", *MUON, *overrides, num_ranks=num_ranks)
    return [record["loss"] for record in found]


@pytest.fixture(scope="module")
def in_fp32(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the losses of one rank without ZeRO, where the optimizer sees the matrices themselves."""
    return losses(tiny_run, tmp_path_factory.mktemp("muon") / "plain", "deepspeed=zero0")


STAGES = [("zero0", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero2", 2)]


@pytest.mark.parametrize(("zero", "num_ranks"), tiers(STAGES, [("zero2", 2)]))
def test_any_stage_of_zero_and_number_of_ranks_trains_as_one_rank_without(
    tiny_run: Run, in_fp32: list[float], tmp_path: Path, zero: str, num_ranks: int
) -> None:
    assert in_fp32[-1] < in_fp32[0]
    in_zero = () if zero == "zero0" else (FP32,)
    partitioned = losses(tiny_run, tmp_path / "a", f"deepspeed={zero}", *in_zero, num_ranks=num_ranks)
    assert partitioned == pytest.approx(in_fp32, rel=2e-4)


def test_a_run_in_bf16_on_two_ranks_resumes_to_the_last_digit(tiny_run: Run, tmp_path: Path) -> None:
    settings, newest = ("deepspeed=zero1", "train.save_every=4", "train.keep_checkpoints=9"), "step_00000008"
    whole = losses(tiny_run, tmp_path / "a", *settings, num_ranks=2)
    for num_ranks, tolerance in ((2, 0.0), (1, 1e-2)):
        shutil.rmtree(tmp_path / "a/run/train/checkpoints" / newest)
        resumed = losses(tiny_run, tmp_path / "a", *settings, num_ranks=num_ranks)
        assert resumed[-4:] == pytest.approx(whole[-4:], rel=tolerance, abs=0)
