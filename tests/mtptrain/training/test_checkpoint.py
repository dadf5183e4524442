"""Tests that all ranks of a run resume from the newest whole checkpoint."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mtptrain.training import checkpoint
from mtptrain.training.checkpoint import (
    MARKER,
    STATE,
    Progress,
    find_fault,
    newest_whole_checkpoint,
    save_checkpoint,
)
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import save_tensors, write_json, write_sealed
from tests.conftest import run_program
from tests.sealed import flip_bit, seal_again

ONE_RANK = Ranks(0, 1, 0)
PLAIN_RUN = ("deepspeed=zero0", "train.validation_prompts=0")


def write_checkpoint(directory: Path, step: int) -> Path:
    folder = directory / f"step_{step:08d}"
    folder.mkdir(parents=True)
    save_tensors(folder / STATE, {"weight": torch.full((64,), float(step))})
    write_sealed(folder / MARKER, {"seed": 0, "step": step}, [STATE])
    return folder


def truncate(state: Path) -> None:
    state.write_bytes(state.read_bytes()[:-100])


def empty(state: Path) -> None:
    state.write_bytes(b"")


def zero(state: Path) -> None:
    """Fills a file with zeros, as a file system may do if the file's blocks were never written."""
    state.write_bytes(bytes(state.stat().st_size))


CHANGED = r"state\.safetensors: must be as mtptrain wrote it, but was changed or damaged since"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, CHANGED),
    "empty": (empty, CHANGED),
    "zeros": (zero, CHANGED),
    "flipped": (lambda state: flip_bit(state, -5), CHANGED),
    "missing": (Path.unlink, r"state\.safetensors: must exist, but does not"),
    "marker": (lambda state: (state.parent / MARKER).write_bytes(b""), r"complete\.json: must be JSON, but is not"),
    "list": (lambda state: (state.parent / MARKER).write_bytes(b"[]"), r"complete\.json: must hold a JSON object, but"),
    "nested": (lambda state: (state.parent / MARKER).write_bytes(b"[" * 100_000), r"complete\.json: .*nested too deep"),
    "hash": (
        lambda state: seal_again(state.parent / MARKER, files=...),
        r"state\.safetensors: must be as mtptrain wrote it",
    ),
    "marker deleted": (lambda state: (state.parent / MARKER).unlink(), r"complete\.json: must exist, but does not"),
    "marker renamed": (
        lambda state: (state.parent / MARKER).rename(state.parent / "complete.json.old"),
        r"complete\.json: must exist, but does not",
    ),
    "seal": (
        lambda state: write_json(state.parent / MARKER, {"step": 8}),
        r"complete\.json: must have the entry seal, but lacks it",
    ),
    "step": (
        lambda state: (state.parent / MARKER).write_text((state.parent / MARKER).read_text().replace("8,", "9,", 1)),
        r"complete\.json: must be as mtptrain wrote it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    older, newest = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 8)
    apply, message = DAMAGES[damage]
    apply(newest / STATE)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == older
    printed = capsys.readouterr().out
    assert re.search(
        rf"WARNING {re.escape(str(newest))}/{message}.*; training resumes from {re.escape(str(older))}", printed
    )
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == older
    assert capsys.readouterr().out == "", "the torn checkpoint must not be reported twice"


def test_the_newest_whole_checkpoint_is_taken_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) is None
    write_checkpoint(tmp_path, 4)
    newest = write_checkpoint(tmp_path, 8)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == newest
    assert capsys.readouterr().out == ""


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path: Path) -> None:
    _, newest = write_checkpoint(tmp_path, 99_999_999), write_checkpoint(tmp_path, 100_000_000)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == newest


def test_where_every_checkpoint_is_torn_the_run_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path, step) for step in (4, 8)]
    for folder in folders:
        truncate(folder / STATE)
    message = (
        r"at least one checkpoint must be whole, but none is \(.*step_00000008/state.*step_00000004/state.*\); restore "
        r"one, or"
    )
    with pytest.raises(UserError, match=message):
        newest_whole_checkpoint(tmp_path, ONE_RANK)
    assert all((folder / MARKER).is_file() for folder in folders)


@pytest.mark.parametrize("num_calls", range(4))
def test_what_a_killed_save_leaves_is_passed_over_and_removed_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_calls: int
) -> None:
    """The first save is killed after so many of its four files have got a name."""
    calls = iter(range(num_calls))
    replace, killed = Path.replace, tmp_path / "step_00000002"

    def replace_or_die(path: Path, target: Path) -> Path:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(checkpoint, "gather_state", lambda engine, keep_here: {"weight": torch.ones(4)})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", replace_or_die)
        save_checkpoint(cast(Any, None), tmp_path, Progress(2), {}, 1, ONE_RANK)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) is None
    printed = capsys.readouterr().out
    assert f"WARNING {killed}: must have complete.json, but has none, as after a kill while it was written" in printed
    save_checkpoint(cast(Any, None), tmp_path, Progress(3), {}, 1, ONE_RANK)
    assert not killed.exists() and newest_whole_checkpoint(tmp_path, ONE_RANK) == tmp_path / "step_00000003"


def test_a_renamed_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = write_checkpoint(tmp_path, 4)
    renamed = write_checkpoint(tmp_path, 8).rename(tmp_path / "step_00000009")
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == older
    assert f"WARNING {renamed}: must be step_00000008, but was renamed" in capsys.readouterr().out


def test_a_new_checkpoint_is_on_the_disk_before_an_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write_checkpoint(tmp_path, 1), tmp_path / "step_00000002"
    flushed: list[tuple[Path, bool]] = []  # what was flushed, and whether the old checkpoint was still there

    def fsync(descriptor: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), (old / MARKER).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoint, "gather_state", lambda engine, keep_here: {"weight": torch.ones(4)})
    save_checkpoint(cast(Any, None), tmp_path, Progress(2), {}, 1, ONE_RANK)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == new and not old.exists()
    assert flushed[-1] == (tmp_path, True), "the parent folder must be flushed before the old checkpoint is removed"
    written = (f"{STATE}.tmp.tmp", f"{MARKER}.tmp.tmp", f"{STATE}.tmp", f"{MARKER}.tmp")
    assert [path for path, _ in flushed] == [*(path for name in written for path in (new / name, new)), tmp_path]


def test_what_somebody_else_has_put_beside_checkpoints_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "gather_state", lambda engine, keep_here: {"weight": torch.ones(4)})
    old, unfinished = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    (unfinished / MARKER).unlink()
    shutil.copytree(old, tmp_path / "step_00000001_good")
    somebodys = ["step_00000001_good/complete.json", "step_best/model.bin", "torn_pages/a.txt"]
    somebodys += ["step_00000001/notes.txt", "step_00000002/notes.txt", "step_00000003/notes.txt"]
    for name in somebodys[1:]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    save_checkpoint(cast(Any, None), tmp_path, Progress(3), {}, 1, ONE_RANK)
    assert [name for name in somebodys if not (tmp_path / name).is_file()] == []
    assert not (old / STATE).exists() and not (unfinished / STATE).exists()
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == tmp_path / "step_00000003"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_goes_on_from_the_checkpoint_before_a_torn_one(
    tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path, num_ranks: int
) -> None:
    """Tests that all ranks resume from the same checkpoint, and end with the weights of a run without a torn one."""
    shutil.copytree(tiny_run[0], tmp_path / "run")
    checkpoints = tmp_path / "run/train/checkpoints"
    settings = (f"run_dir={tmp_path}/run", *tiny_run[1], "train.max_steps=4", "train.save_every=2", *PLAIN_RUN)
    assert run_program("train", *settings, num_ranks=num_ranks).returncode == 0
    undisturbed = (tmp_path / "run/train/last/head.safetensors").read_bytes()
    truncate(checkpoints / "step_00000004" / STATE)
    result = run_program("train", *settings, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("step_00000004/state.safetensors: must be as mtptrain wrote it") == 1, (
        "only rank 0 must print the warning"
    )
    assert (tmp_path / "run/train/last/head.safetensors").read_bytes() == undisturbed
    assert find_fault(checkpoints / "step_00000004") is None
    assert {path.name for path in checkpoints.iterdir()} == {"step_00000002", "step_00000004"}, (
        "the torn checkpoint must be removed"
    )


def test_settings_are_compared_with_the_checkpoint_that_is_loaded(
    tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    shutil.copytree(tiny_run[0], tmp_path / "run")
    checkpoints = tmp_path / "run/train/checkpoints"
    settings = (f"run_dir={tmp_path}/run", *tiny_run[1], "train.max_steps=2", "train.save_every=1", *PLAIN_RUN)
    assert run_program("train", *settings).returncode == 0
    truncate(checkpoints / "step_00000002" / STATE)
    marker = checkpoints / "step_00000001" / MARKER
    seal_again(marker, seed=7)
    result = run_program("train", *settings)
    assert result.returncode != 0
    assert (
        "step_00000001: seed must be 7, but is 0; restore these settings to resume from this checkpoint"
        in result.stderr
    )
