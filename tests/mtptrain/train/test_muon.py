"""Tests that training with Muon does not depend on ranks or ZeRO, and resumes to the last digit."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Run, run_program, tiers
from tests.mtptrain.train.runs import FP32, records

MUON = ("train.optimizer=muon", "train.validation_prompts=0", "train.validate_every=0", "train.max_steps=8")


def losses(run: Run, directory: Path, *overrides: str, num_ranks: int = 1) -> list[float]:
    """Trains in a folder that has the run's hidden states, and returns the losses of all steps."""
    if not directory.exists():
        directory.mkdir(parents=True)
        for stage in ("prompts", "hidden_states"):
            (directory / stage).symlink_to(run[0] / stage)
    result = run_program("train", *run[1], f"run_dir={directory}", *MUON, *overrides, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return [record["loss"] for record in records(directory)]


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


@pytest.mark.parametrize(
    ("num_ranks", "zero"), [(2, "zero1"), pytest.param(1, "zero1", marks=pytest.mark.slow)], ids=str
)
def test_a_run_in_bf16_resumes_to_the_last_digit(tiny_run: Run, tmp_path: Path, num_ranks: int, zero: str) -> None:
    settings = (f"deepspeed={zero}", "train.save_every=4", "train.keep_checkpoints=9")
    whole = losses(tiny_run, tmp_path / "a", *settings, num_ranks=num_ranks)
    shutil.rmtree(tmp_path / "a/train/checkpoints/step_00000008")
    assert losses(tiny_run, tmp_path / "a", *settings, num_ranks=num_ranks)[-4:] == whole[-4:]
    # With AdamW or another number of ranks it resumes as the settings say.
    shutil.rmtree(tmp_path / "a/train/checkpoints/step_00000008")
    other = losses(tiny_run, tmp_path / "a", *settings, num_ranks=3 - num_ranks)
    assert other[-4:] == pytest.approx(whole[-4:], rel=1e-2)
    shutil.rmtree(tmp_path / "a/train/checkpoints/step_00000008")
    arguments = (*tiny_run[1], f"run_dir={tmp_path}/a", *MUON, *settings, "train.optimizer=adamw")
    refused = run_program("train", *arguments, num_ranks=num_ranks)
    assert refused.returncode == 1 and "train.optimizer must be muon, but is adamw" in refused.stderr
