"""One program at a time writes to a stage's folder."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mtptrain.utils.errors import UserError
from mtptrain.utils.locks import locked, release_locks
from tests.conftest import run_program
from tests.programs import ROOT

HOLD = """
import sys, time
from pathlib import Path
from mtptrain.utils.locks import locked
with locked(Path(sys.argv[1]), "run_dir", "mtptrain hold"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that holds the lock until it is killed, at the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stage", ["prompts", "hidden-states", "train", "acceptance"])
def test_a_second_program_in_the_same_folder_is_refused_and_changes_nothing(
    fresh_run: tuple[Path, tuple[str, ...]], stage: str
) -> None:
    run_dir, overrides = fresh_run
    stage_dir = run_dir / stage.replace("-", "_")
    stage_dir.mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in stage_dir.iterdir() if path.is_file()}
    with holder(stage_dir / ".mtptrain.lock") as process:
        done = run_program(stage, *overrides)
    assert done.returncode == 1, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert f"{stage_dir} must be written by one program at a time, but process {process.pid} on" in line
    assert {path: path.read_bytes() for path in stage_dir.iterdir() if path.name != ".mtptrain.lock"} == before


def test_the_lock_of_a_killed_program_is_free_and_that_of_a_finished_one_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "train" / ".mtptrain.lock"
    with (
        holder(path) as process,
        pytest.raises(UserError, match=f"but process {process.pid} on .* writes there"),
        locked(path, "run_dir", "mtptrain test"),
    ):
        pass
    assert path.is_file()
    with locked(path, "run_dir", "mtptrain test"):
        (path.parent / "metrics.jsonl").touch()
    assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"]


def test_folders_that_were_made_for_a_refused_program_are_removed(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        locked(tmp_path / "runs" / "a" / "train" / ".mtptrain.lock", "run_dir", "mtptrain test"),
    ):
        raise KeyError
    assert not any(tmp_path.iterdir())


def test_ranks_that_a_program_starts_take_its_lock(tmp_path: Path) -> None:
    path = tmp_path / ".mtptrain.lock"
    with ExitStack() as stack:
        with locked(path, "run_dir", "mtptrain test"):
            release_locks()
            stack.enter_context(holder(path))
        assert path.is_file()  # the file is the other process's now


def test_a_lock_that_its_holder_removes_in_between_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / ".mtptrain.lock", fcntl.flock
    removed = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(path, "run_dir", "mtptrain test"):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_that_a_third_program_takes_and_removes_in_between_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, stat = tmp_path / ".mtptrain.lock", fcntl.flock, Path.stat
    of_others: list[Path] = []

    def replace_first(descriptor: int, operation: int) -> None:
        if not of_others:
            path.unlink()
            path.touch()
            of_others.append(path)
        lock(descriptor, operation)

    def remove_after_a_look(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = stat(self, follow_symlinks=follow_symlinks)
        if self in of_others:
            path.unlink()
            of_others[0] = tmp_path / "removed"
        return found

    monkeypatch.setattr(fcntl, "flock", replace_first)
    monkeypatch.setattr(Path, "stat", remove_after_a_look)
    with locked(path, "run_dir", "mtptrain test"):
        assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.warns(UserWarning, match="do not start two programs"),
        locked(tmp_path / "lock", "run_dir", "mtptrain test"),
    ):
        pass
