"""Tests which checkpoint a run resumes from after kills and damage, and what a save leaves on the disk."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mtptrain.training import checkpoint
from mtptrain.training.checkpoint import MARKER, STATE, Progress, newest_whole_checkpoint, save_checkpoint
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import save_tensors, write_json, write_sealed
from tests.sealed import seal_again

ONE_RANK = Ranks(0, 1, 0)


def write_checkpoint(directory: Path, step: int) -> Path:
    folder = directory / f"step_{step:08d}"
    folder.mkdir(parents=True)
    save_tensors(folder / STATE, {"weight": torch.full((64,), float(step))})
    write_sealed(folder / MARKER, {"seed": 0, "step": step}, [STATE])
    return folder


def save(directory: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves a checkpoint, and keeps no older one."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "gather_state", lambda engine, keep_here: {"weight": torch.ones(4)})
        save_checkpoint(cast(Any, None), directory, Progress(step), {}, 1, ONE_RANK)


def truncate(state: Path) -> None:
    state.write_bytes(state.read_bytes()[:-100])


CHANGED = r"state\.safetensors: must be as mtptrain wrote it, but was changed or damaged since"
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (STATE, truncate, CHANGED),
    (STATE, lambda path: path.write_bytes(bytes(path.stat().st_size)), CHANGED),  # as after a file system's crash
    (STATE, Path.unlink, r"state\.safetensors: must exist, but does not"),
    (MARKER, lambda path: path.write_bytes(b""), r"complete\.json: must be JSON, but is not"),
    (MARKER, lambda path: seal_again(path, files=...), r"state\.safetensors: must be as mtptrain wrote it"),
    (MARKER, Path.unlink, r"complete\.json: must exist, but does not"),
    (MARKER, lambda path: write_json(path, {"step": 8}), r"complete\.json: must have the entry seal, but lacks it"),
]


def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (name, damage, message) in enumerate(DAMAGES):
        directory = tmp_path / str(number)
        older, newest = write_checkpoint(directory, 4), write_checkpoint(directory, 8)
        damage(newest / name)
        assert newest_whole_checkpoint(directory, ONE_RANK) == older
        line = rf"WARNING {re.escape(str(newest))}/{message}.*; training resumes from {re.escape(str(older))}"
        assert re.search(line, capsys.readouterr().out), message
        assert newest_whole_checkpoint(directory, ONE_RANK) == older
        assert capsys.readouterr().out == "", "the torn checkpoint must not be reported twice"


def test_the_newest_whole_checkpoint_is_taken_and_renamed_ones_and_a_run_without_any_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) is None
    older, newest = write_checkpoint(tmp_path, 99_999_999), write_checkpoint(tmp_path, 100_000_000)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == newest, "nine digits are newer than eight"
    assert capsys.readouterr().out == ""
    renamed = newest.rename(tmp_path / "step_100000001")
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == older
    assert f"WARNING {renamed}: must be step_100000000, but was renamed" in capsys.readouterr().out
    folders = [write_checkpoint(tmp_path / "torn", step) for step in (4, 8)]
    for folder in folders:
        truncate(folder / STATE)
    message = r"at least one .* whole, but none is \(.*step_00000008/state.*step_00000004/state.*\); restore one, or"
    with pytest.raises(UserError, match=message):
        newest_whole_checkpoint(tmp_path / "torn", ONE_RANK)
    assert all((folder / MARKER).is_file() for folder in folders), "nothing must be touched"


def test_what_a_killed_save_leaves_is_passed_over_and_removed_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first save is killed after so many of its four files have got a name."""
    replace = Path.replace
    for num_calls in range(4):
        calls, directory = iter(range(num_calls)), tmp_path / str(num_calls)
        killed = directory / "step_00000002"

        def replace_or_die(path: Path, target: Path, calls: Iterator[int] = calls) -> Path:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return replace(path, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", replace_or_die)
            save(directory, 2, monkeypatch)
        assert newest_whole_checkpoint(directory, ONE_RANK) is None
        message = f"WARNING {killed}: must have complete.json, but has none, as after a kill while it was written"
        assert message in capsys.readouterr().out
        save(directory, 3, monkeypatch)
        assert not killed.exists()
        assert newest_whole_checkpoint(directory, ONE_RANK) == directory / "step_00000003"


def test_a_new_checkpoint_is_on_the_disk_before_an_old_one_is_removed_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, unfinished, new = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2), tmp_path / "step_00000003"
    (unfinished / MARKER).unlink()
    shutil.copytree(old, tmp_path / "step_00000001_good")
    mine = ["step_00000001_good/complete.json", "step_best/model.bin", "torn_pages/a.txt", "step_00000001/notes.txt"]
    mine += ["step_00000002/notes.txt", "step_00000003/notes.txt"]
    for name in mine[1:]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    flushed: list[tuple[Path, bool]] = []  # what was flushed, and whether the old checkpoint was still there

    def fsync(descriptor: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), (old / MARKER).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 3, monkeypatch)
    assert newest_whole_checkpoint(tmp_path, ONE_RANK) == new
    assert flushed[-1] == (tmp_path, True), "the parent folder must be flushed before the old checkpoint is removed"
    written = (f"{STATE}.tmp.tmp", f"{MARKER}.tmp.tmp", f"{STATE}.tmp", f"{MARKER}.tmp")
    assert [path for path, _ in flushed] == [*(path for name in written for path in (new / name, new)), tmp_path]
    assert [name for name in mine if not (tmp_path / name).is_file()] == []
    assert not (old / STATE).exists() and not (unfinished / STATE).exists()
