"""Tests that training resumes after a kill or a signal with bit-identical losses, and from which checkpoint."""

import json
import signal
from pathlib import Path

import pytest

from mtptrain.training.checkpoint import MARKER, STATE
from tests.conftest import Run, start_program, succeed
from tests.mtptrain.train.conftest import Reference
from tests.mtptrain.train.runs import (
    FP32,
    PLAIN_STEPS,
    assert_close,
    copy_of,
    figures,
    head_bytes,
    records,
    refused,
    train,
    wait_for_records,
)
from tests.sealed import flip_bit, seal_again

ONE_RANK = (*PLAIN_STEPS, "deepspeed=zero0")
"""With these settings, a run on one rank is that of the fixture `reference`."""


@pytest.fixture(scope="module")
def interrupted(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a run that a signal stopped, and that was killed after it went on, a step after its newest checkpoint."""
    run = copy_of((tiny_run[0], ("run_dir", *tiny_run[1])), tmp_path_factory.mktemp("interrupted"))
    program = start_program("train", *run[1], *ONE_RANK)
    wait_for_records(program, run, 2)
    program.signal(signal.SIGTERM)
    result, saved = program.result(), len(records(run[0]))
    assert result.returncode == 75, result.stderr[-3000:]
    assert f"step {saved}: SIGTERM, checkpoint saved" in result.stdout
    assert (run[0] / f"train/checkpoints/step_{saved:08d}/{MARKER}").is_file()
    program = start_program("train", *run[1], *ONE_RANK, "train.save_every=2")
    wait_for_records(program, run, saved + 3)
    program.kill()
    assert saved + 3 <= len(records(run[0])) < 12
    return run


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_and_killed_run_resumes_with_bit_identical_losses_from_the_checkpoint_before_a_torn_one(
    interrupted: Run, tmp_path: Path, reference: Reference, num_ranks: int
) -> None:
    """All ranks resume from the same checkpoint. A torn last record, and a folder without a marker, are removed."""
    run = copy_of(interrupted, tmp_path)
    checkpoints = run[0] / "train/checkpoints"
    torn, unfinished = max(checkpoints.iterdir()), checkpoints / "step_00000011"
    (torn / STATE).write_bytes((torn / STATE).read_bytes()[:-100])
    unfinished.mkdir()
    with (run[0] / "train/metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    result = succeed("train", *run[1], *ONE_RANK, "train.save_every=6", num_ranks=num_ranks)
    message = f"{torn.name}/{STATE}: must be as mtptrain wrote it"
    assert result.stdout.count(message) == 1, "only rank 0 must print the warning"
    if num_ranks == 1:
        assert figures(records(run[0])) == figures(reference.records)
        assert head_bytes(run) == head_bytes(reference.run)
    assert_close(records(run[0]), reference.records)
    kept = {path.name for path in checkpoints.iterdir()}
    assert kept == {"step_00000006", "step_00000012"}, "the torn and the unfinished checkpoint must be removed"


def test_a_killed_run_goes_on_with_another_number_of_ranks_and_another_zero_stage(
    interrupted: Run, tmp_path: Path, reference: Reference
) -> None:
    """Documents, weights and Adam moments stay the same, so the losses equal those of a run that never stopped."""
    found = train(copy_of(interrupted, tmp_path), *PLAIN_STEPS, "deepspeed=zero2", FP32, num_ranks=2)
    assert_close(found, reference.records)


def test_a_run_resumes_only_with_the_settings_of_the_checkpoint_that_it_loads(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(reference.run, tmp_path)
    older, newest = (run[0] / f"train/checkpoints/step_{step:08d}" for step in (8, 12))
    settings = (run[0] / "train/stage.json").read_text()
    fewer = refused(run, "train.max_steps=11")
    assert f"train.max_steps: must be at least 12, the step of {newest}, but" in fewer and "=12, or" in fewer
    message = "step_00000012: seed must be 0, but is 1; restore these settings to resume from this checkpoint"
    assert message in refused(run, "seed=1")
    facts = json.loads((newest / MARKER).read_text())
    del facts["head"]["intermediate_size"]  # imitate an older checkpoint, which lacks a setting added since
    # Imitate a checkpoint from before packing had a version, which is refused.
    lacking = [name for name in facts if "packing" in name] + ["train.optimizer"]  # the latter has its default
    seal_again(newest / MARKER, head=facts["head"], **dict.fromkeys(lacking, ...))
    found = refused(run, "train.lr=1e-6")
    assert "step_00000012: train.lr must be 0.003, but is 1e-06; the version of the packing of documents must" in found
    assert "packing of documents must be None, but is 2; restore these settings to resume" in found
    (newest / STATE).unlink()
    seal_again(older / MARKER, seed=7)
    assert "step_00000008: seed must be 7, but is 0; restore these settings to resume from this" in refused(run)
    assert (older / MARKER).is_file() and (run[0] / "train/stage.json").read_text() == settings
    older.parent.rename(tmp_path / "elsewhere")
    refused(run, "train.micro_batches_per_step=5000")  # which is found out later
    assert f"WARNING {run[0]}/train/last: must have a checkpoint beside it" in capsys.readouterr().out


REFUSED = {
    "train.micro_batches_per_step=5000": "must be at most the number of documents with draft positions, but is 5000",
    "hidden_states.dtype=bfloat16": "the compute dtype",
    "acceptance.prompt_tokens=400": "acceptance.prompt_tokens: held-out documents must hold a prompt of 400 tokens",
}


def test_bad_settings_are_refused_before_training(tiny_run: Run) -> None:
    for override, message in REFUSED.items():
        assert message in refused(tiny_run, f"run_dir={tiny_run[0]}", override)
    ranks = refused(tiny_run, f"run_dir={tiny_run[0]}", "train.micro_batches_per_step=3", num_ranks=2)
    message = "train.micro_batches_per_step: must be a multiple of the number of ranks, 2, but is 3; set it to 4, or ch"
    assert ranks.startswith(message)


def test_a_flipped_bit_that_decides_the_steps_is_named_before_training_begins(fresh_run: Run) -> None:
    flip_bit(fresh_run[0] / "hidden_states/shard_00001.safetensors", -1)  # in the loss mask
    with pytest.warns(UserWarning, match="can be trained and measured, but not exported: head.zero_first_embedding"):
        found = refused(fresh_run, "head.zero_first_embedding=true")
    assert "shard_00001.safetensors: the checksum of header, tables and loss mask of shard 1 must be" in found
