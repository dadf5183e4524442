"""Tests that training resumes after a kill or a signal with bit-identical losses, and what Ctrl-C prints and keeps."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eval.checks.processes import kill_tree
from mtptrain.training.checkpoint import finished_checkpoints
from tests.conftest import Run, program_command
from tests.mtptrain.train.runs import FP32, figures, records, train
from tests.programs import ROOT


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1)])
def test_a_killed_run_resumes_with_bit_identical_losses(
    fresh_run: Run, tmp_path: Path, num_ranks: int, stage: int
) -> None:
    settings = (f"deepspeed=zero{stage}", "train.save_every=4", "train.validate_every=10", *[FP32] * (stage > 0))
    undisturbed = train(fresh_run, *settings, num_ranks=num_ranks)
    run_dir, overrides = fresh_run
    (run_dir / "train").rename(tmp_path / "undisturbed")

    command = program_command("train", *overrides, *settings, num_ranks=num_ranks)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while len(records(run_dir)) < 10:
        assert process.poll() is None, "training ended before the kill"
        time.sleep(0.01)
    kill_tree(process.pid)
    process.wait()
    assert 10 <= len(records(run_dir)) < 20

    resumed = train(fresh_run, *settings, num_ranks=num_ranks)
    assert figures(resumed) == figures(undisturbed)
    assert (run_dir / "train/last/head.safetensors").read_bytes() == (
        tmp_path / "undisturbed/last/head.safetensors"
    ).read_bytes()


def interrupted(run: Run, tmp_path: Path, *settings: str) -> str:
    """Stops a training run with Ctrl-C after at least five steps. Returns what it wrote to stderr."""
    run_dir, overrides = run
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(program_command("train", *overrides, *settings), cwd=ROOT, stderr=stderr)
    while len(records(run_dir)) < 5:
        assert process.poll() is None, "training ended before Ctrl-C"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=60) == 130
    finally:
        kill_tree(process.pid)
    return (tmp_path / "stderr").read_text()


def test_ctrl_c_ends_with_a_line_and_the_same_command_goes_on_from_the_newest_checkpoint(
    fresh_run: Run, tmp_path: Path
) -> None:
    run_dir, _ = fresh_run
    settings = ("deepspeed=zero0", "train.save_every=2", "train.validation_prompts=0", "train.max_steps=40")
    errors = interrupted(fresh_run, tmp_path, *settings)
    newest = finished_checkpoints(run_dir / "train/checkpoints")[-1]
    assert errors.endswith(
        f"\nstopped by Ctrl-C; the newest checkpoint, of step {int(newest.name[-8:])}, is kept in {newest}; the same "
        "command continues from it, unless it sets train.resume=never\n"
    )
    assert "Traceback" not in errors
    assert 5 <= len(records(run_dir)) < 40
    assert len(train(fresh_run, *settings)) == 40


def test_ctrl_c_before_the_first_checkpoint_says_that_the_same_command_starts_over(
    fresh_run: Run, tmp_path: Path
) -> None:
    run_dir, _ = fresh_run
    errors = interrupted(fresh_run, tmp_path, "deepspeed=zero0", "train.validation_prompts=0", "train.max_steps=40")
    assert errors.endswith(
        f"\nstopped by Ctrl-C; no checkpoint was saved in {run_dir}/train/checkpoints yet, so the same command starts "
        "over; train.save_every sets how often to save one\n"
    )
    assert not list((run_dir / "train").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("number", "num_ranks"),
    [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)],
    ids=["SIGTERM to one rank", "SIGUSR1 to one of two ranks"],
)
def test_a_signal_ends_the_step_saves_it_and_the_next_run_goes_on_with_bit_identical_losses(
    fresh_run: Run, tmp_path: Path, number: signal.Signals, num_ranks: int
) -> None:
    settings = ("deepspeed=zero1", FP32, "train.max_steps=40", "train.validate_every=10")
    undisturbed = train(fresh_run, *settings, num_ranks=num_ranks)
    run_dir, overrides = fresh_run
    (run_dir / "train").rename(tmp_path / "undisturbed")

    command = program_command("train", *overrides, *settings, num_ranks=num_ranks)
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    while len(records(run_dir)) < 5:
        assert process.poll() is None, "training ended before the signal"
        time.sleep(0.01)
    os.kill(children(process.pid)[-1] if num_ranks > 1 else process.pid, number)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()  # end training that hangs; torchrun then kills its ranks

    errors = (tmp_path / "stderr").read_text()
    assert process.returncode == 75 if num_ranks == 1 else re.search(r"exitcode *: 75 ", errors), errors[-3000:]
    saved = len(records(run_dir))
    assert 5 <= saved < 40
    assert f"step {saved}: {number.name}, checkpoint saved" in output
    assert (run_dir / f"train/checkpoints/step_{saved:08d}/complete.json").is_file()
    resumed = train(fresh_run, *settings, num_ranks=num_ranks)
    assert figures(resumed) == figures(undisturbed)
    assert (run_dir / "train/last/head.safetensors").read_bytes() == (
        tmp_path / "undisturbed/last/head.safetensors"
    ).read_bytes()


def children(parent: int) -> list[int]:
    """Returns the ids of the processes that `parent` has started, the youngest last."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(path.parent.name))
    return sorted(found)


def test_metrics_that_a_kill_has_torn_do_not_keep_a_run_from_going_on(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=3", "train.validation_prompts=0")
    with (fresh_run[0] / "train/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (fresh_run[0] / "train/checkpoints/step_00000002").mkdir()  # a checkpoint without its marker
    assert [record["step"] for record in train(fresh_run, "train.max_steps=5", "train.validation_prompts=0")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert not (fresh_run[0] / "train/checkpoints/step_00000002").exists()
