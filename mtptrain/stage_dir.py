"""Opens the folders that programs write to, and records how each was made.

A folder with `stage.json` belongs to mtptrain. A program writes this file before any other, and refuses a folder that
has other files but not this one, so it neither deletes nor overwrites what somebody else has written.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtptrain.utils.errors import StageMissing, UserError, warn
from mtptrain.utils.files import FILES, describe_file, naming, read_json, sync, unique_temporary, write_json
from mtptrain.utils.masking import hide_home, hide_passwords
from mtptrain.utils.startup import command

STAGE = "stage.json"
_SETTINGS = "settings"
FACTS = ("argv", "git_revision", "python", "packages")
"""Entries of every `stage.json`, besides the settings."""
_LOCK = ".mtptrain.lock"
PACKAGES = ("mtptrain", "torch", "transformers", "deepspeed", "safetensors", "tokenizers", "datasets")
"""Packages whose versions every `stage.json` records."""


@dataclass(frozen=True)
class StageDir:
    """The folder of a stage or of another program's output.

    `stage.json` has the settings with which the program ran, its arguments and the versions of packages. In an export
    it also has the size and hash of every file.
    """

    path: Path
    setting: str = "run_dir"
    """Name of the setting that chooses the folder, for error messages."""

    def check(self) -> None:
        """Refuse a folder that is not empty and has no `stage.json` of ours, or a path that is a file."""
        problem, others = None, self._others_file()
        if (self.path.exists() or self.path.is_symlink()) and not self.path.is_dir():
            problem = "is no folder"
        elif others is not None:
            problem = f"holds {others.relative_to(self.path)} of somebody else"
            if (self.path / STAGE).exists():
                problem = f"its {STAGE} cannot be read"
        if problem is not None:
            raise UserError(
                f"{self.setting}: {self.path} must be new, empty or written by mtptrain, which leaves {STAGE} there, "
                f"but {problem}; move that away, or set another {self.setting}"
            )

    @contextmanager
    def writing(self, part: int = 0) -> Iterator[Path]:
        """Hold the folder while the block writes to it, and yield its path; refuse it if another program writes there.

        Programs call this before any work, and before they fork ranks, of which the first holds the folder for all. The
        system frees the lock when its processes end, however they end. Programs with different numbers `part` may write
        at the same time. After the block, folders that were made for it and are still empty are removed.
        """
        if os.environ.get("RANK", "0") != "0":
            yield self.path
            return
        self.check()
        made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / (f".{part}{_LOCK}" if part else _LOCK)
        holder, descriptor = os.getpid(), self._take(lock)
        try:
            yield self.path
        finally:
            if os.getpid() == holder:  # not a rank that this process became, which keeps the lock until all have ended
                if _is_at(descriptor, lock):
                    lock.unlink()
                for directory in made:
                    with suppress(OSError):  # it holds the output
                        directory.rmdir()
            os.close(descriptor)

    def parts(self) -> list[int]:
        """Returns the parts whose programs may write to the folder now, for `writing`; 0 is always among them."""
        locks = (path.name.removesuffix(_LOCK).removeprefix(".") for path in self.path.glob(f".*{_LOCK}"))
        return sorted({0, *(int(each) for each in locks if each.isdigit())})

    def _take(self, lock: Path) -> int:
        """Returns the descriptor of the lock's file, which this process then holds."""
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"{self.setting}: {self.path} must be written by one program at a time, but {holder} writes there; "
                f"wait until it has ended, or set another {self.setting}"
            ) from None
        except OSError as error:
            warn(
                f"{self.setting}: {self.path} should be on a file system with locks, but this one has none "
                f"({error.strerror}); do not start two programs that write there"
            )
        if not _is_at(descriptor, lock):  # its holder removed it after this process had opened it
            os.close(descriptor)
            return self._take(lock)
        os.ftruncate(descriptor, 0)
        with naming(lock):
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} ({command()})"[:1000].encode())
        return descriptor

    def record(self, config: object, output: str | None = None) -> None:
        """Write `stage.json` with the settings of this run.

        `output` is the file that marks a finished stage. It is removed before the settings change, so that after a kill
        old files never pass as made with the new settings.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if output is not None:
            (self.path / output).unlink(missing_ok=True)
        facts = (hide_passwords(sys.argv), git_revision(), sys.version.split()[0], package_versions())
        stored = dict(zip(FACTS, facts, strict=True)) | {_SETTINGS: _plain(config)}
        write_json(self.path / STAGE, stored, unique_temporary(self.path / STAGE))

    def claim(self, config: object) -> None:
        """Record the settings in a folder without `stage.json`. Several processes may call this at the same time."""
        if not self._is_ours():
            self.record(config)

    def settings(self) -> dict[str, Any] | None:
        """Returns the recorded settings; None in a folder that is not ours."""
        return self._stored()[_SETTINGS] if self._is_ours() else None

    def was_made_with(self, config: object, names: Sequence[str]) -> bool:
        """Returns whether these recorded settings are those of `config`. In an export, `~` hides the home."""
        settings = self.settings()

        def shown(settings: dict[str, Any]) -> str:  # as text, because 0 equals false as a value
            return json.dumps([settings.get(name) for name in names], sort_keys=True, default=str)

        present = _plain(config)
        return settings is not None and shown(settings) in [shown(each) for each in (present, _public(present))]

    def files(self) -> dict[str, Any]:
        """Returns the files that `replaced` wrote, as `stage.json` describes them."""
        files = self._stored().get(FILES)
        return files if isinstance(files, dict) else {}

    def check_replaceable(self) -> None:
        """Refuse to replace the folder unless every file in it is as `replaced` wrote it, and none was added."""
        if self.path.resolve() == Path.cwd():
            raise UserError(
                f"{self.setting}: {self.path} must not be the directory in which the command runs, because it is "
                "replaced as a whole, but is; set a directory inside it"
            )
        for beside in self._beside():
            beside.check()
            if beside.path.is_symlink():
                raise UserError(
                    f"{self.setting}: {beside.path} must not be a link, but is; move it away, or set another "
                    f"{self.setting}"
                )
        self.check()
        files = self.files()
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            is_known = path.is_file() and path.name in (*files, STAGE)
            if not is_known or (path.name in files and files[path.name] != describe_file(path)):
                raise UserError(
                    f"{self.setting}: {self.path} must hold only the files of an earlier export to be replaced, but "
                    f"{path.name} {'was changed since' if is_known else 'is none of them'}; move it away, or set "
                    f"another {self.setting}"
                )

    @contextmanager
    def replaced(self, config: object) -> Iterator[Path]:
        """Yields a new folder that takes the place of this one once the block has ended without an error.

        A kill leaves this folder as it was, absent or new. Whatever else it leaves beside it is ours, and the next call
        removes it. `stage.json` has `~` in place of the user's home, since an export may be published.
        """
        self.check_replaceable()
        new, old = self._beside()
        if old.path.exists() and not self.path.exists():  # a kill came between the two renames below
            old.path.rename(self.path)
        new._remove()
        old._remove()
        new.record(config)
        try:
            yield new.path
            files = {path.name: describe_file(path) for path in sorted(new.path.iterdir()) if path.name != STAGE}
            write_json(new.path / STAGE, _public(new._stored()) | {FILES: files})
            self.check_replaceable()
        except BaseException:  # if the disk is full, the unfinished folder would keep it full
            new._remove()
            raise
        if self.path.exists():
            self.path.rename(old.path)
        new.path.rename(self.path)
        sync(self.path.parent)
        old._remove()

    def _beside(self) -> "tuple[StageDir, StageDir]":
        """Returns the folders in which a replacement is written and the replaced folder is put aside."""
        new, old = (self.path.with_name(f"{self.path.name}.mtptrain_{age}") for age in ("new", "old"))
        return StageDir(new, self.setting), StageDir(old, self.setting)

    def _remove(self) -> None:
        """Remove a folder of ours. What marks it as ours goes last, so that a kill leaves a folder that still is."""
        if self.path.is_dir():
            for path in sorted(self.path.iterdir(), key=lambda each: each.name == STAGE):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self.path.rmdir()

    def _others_file(self) -> Path | None:
        """Returns a file of a folder that is not ours. Subfolders that are ours, or have no files, do not count."""
        if not self.path.is_dir() or self._is_ours():
            return None
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and not path.is_symlink():
                if (others := StageDir(path)._others_file()) is not None:
                    return others
            elif not path.name.endswith(_LOCK) and not path.match(f"{STAGE}.*.tmp"):  # a kill may leave these
                return path
        return None

    def _is_ours(self) -> bool:
        stored = self._stored()
        return set(FACTS) <= stored.keys() and isinstance(stored.get(_SETTINGS), dict)

    def _stored(self) -> dict[str, Any]:
        """Returns the contents of `stage.json`, or an empty dict if there is none that can be read."""
        with suppress(OSError, ValueError):
            return read_json(self.path / STAGE)
        return {}


def require(path: Path, program: str) -> Path:
    """Returns `path`, the output of an earlier stage. Raises StageMissing if that stage has not been run."""
    if not path.exists():
        raise StageMissing(f"{path}: must exist, but does not; run {program} with the same recipe and run_dir first")
    return path


def _plain(config: object) -> dict[str, Any]:
    """Returns the settings without passwords, as JSON stores them."""
    settings = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    plain: dict[str, Any] = json.loads(json.dumps(hide_passwords(settings)))
    return plain


def _public(content: dict[str, Any]) -> dict[str, Any]:
    """Returns what JSON stores with `~` in place of the user's home."""
    public: dict[str, Any] = json.loads(hide_home(json.dumps(content, ensure_ascii=False)))
    return public


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def git_revision() -> str | None:
    """Returns the revision of mtptrain's own checkout; None in a package that is installed, even inside another one."""
    with suppress(FileNotFoundError):  # git is not installed
        command = ["git", "--git-dir=.git", "describe", "--always", "--dirty", "--abbrev=40"]
        root = Path(__file__).parents[1]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def package_versions() -> dict[str, str | None]:
    """Returns the version of each package; None for one that is not installed, such as mtptrain in a bare checkout."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
