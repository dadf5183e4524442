"""Opens the folders that programs write to, and records how each was made.

A folder with `provenance.json` belongs to mtptrain. A program writes this file before any other, and refuses a folder
that has other files but not this one, so it neither deletes nor overwrites what somebody else has written.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mtptrain.command_line.program import command
from mtptrain.command_line.stages import settings_of
from mtptrain.config import PipelineConfig
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import StageMissing, UserError
from mtptrain.utils.files import FILES, describe_file, read_json, sync, write_json, write_text
from mtptrain.utils.locks import locked
from mtptrain.utils.masking import hide_home, hide_passwords

CONFIG, PROVENANCE = "config.yaml", "provenance.json"
_LOCK = ".mtptrain.lock"
_FACTS = ("argv", "git_revision", "python", "packages")
"""Entries of every `provenance.json`."""
_RECORDED_PACKAGES = ("mtptrain", "torch", "transformers", "deepspeed", "safetensors", "tokenizers", "datasets")


def check_stage_dir(directory: Path, setting: str = "run_dir") -> None:
    """Refuse a folder that holds files of somebody else. Every program calls this before any work.

    Args:
        directory: the folder that the program will write to.
        setting: name of the setting that chooses the folder, for error messages.

    Raises:
        UserError: the folder is not empty and has no `provenance.json` of ours, or the path is a file.
    """
    if directory.is_symlink() and not directory.exists():
        problem: str | None = "is a link to nothing"
    elif directory.exists() and not directory.is_dir():
        problem = "is a file"
    else:
        others = _others_file(directory)
        problem = None if others is None else f"holds {others.relative_to(directory)} of somebody else"
    if problem is not None:
        raise UserError(
            f"{setting}: {directory} must be new, empty or written by mtptrain, which leaves {PROVENANCE} there, but "
            f"{problem}; move that away, or set another {setting}"
        )


@contextmanager
def writing(directory: Path, ranks: Ranks | None = None, setting: str = "run_dir", part: int = 0) -> Iterator[None]:
    """Hold a folder while the block writes to it. Every program with a folder calls this before any work, on all ranks.

    Only `mtptrain export` does not: it replaces its folder as a whole.

    Args:
        directory: the folder.
        ranks: the first rank holds the folder for all; None for a program without ranks.
        setting: name of the setting that chooses the folder, for error messages.
        part: programs with different numbers may write at the same time.

    Raises:
        UserError: `check_stage_dir` refuses the folder, or another program writes there.
    """
    if ranks is not None and not ranks.is_first:
        yield
        return
    check_stage_dir(directory, setting)
    with locked(directory / (f".{part}{_LOCK}" if part else _LOCK), setting, command()):
        yield


def output_dir_of(given: str | None, setting: str, default: Path) -> tuple[Path, str]:
    """Returns the folder of a program's output, and the name of the setting that chooses it.

    Args:
        given: the program's own setting for the folder; None for the default.
        setting: name of that setting.
        default: the folder in `run_dir`.
    """
    return (default, "run_dir") if given is None else (Path(given), setting)


@contextmanager
def writing_output(given: str | None, setting: str, default: Path, ranks: Ranks | None = None) -> Iterator[Path]:
    """Hold the folder of a program's output, as `writing` does, and yield it.

    Args:
        given: as in `output_dir_of`, like `setting` and `default`.
        setting: the name that error messages show.
        default: the folder without a setting.
        ranks: as in `writing`.

    Raises:
        UserError: `writing` refuses the folder.
    """
    directory, chooser = output_dir_of(given, setting, default)
    with writing(directory, ranks, chooser):
        yield directory


def write_provenance(stage_dir: Path, config: PipelineConfig, output: str | None = None) -> None:
    """Write `provenance.json` (argv, git revision, versions) and `config.yaml` (resolved) into a stage's folder.

    Args:
        stage_dir: the folder.
        config: the settings of this run.
        output: the file that marks a finished stage, to be written again last. It is removed before `config.yaml`
            changes, so that after a kill old files never pass as made with the new settings.

    Raises:
        UserError: `check_stage_dir` refuses the folder.
    """
    check_stage_dir(stage_dir)
    stage_dir.mkdir(parents=True, exist_ok=True)
    provenance = {
        "argv": hide_passwords(sys.argv),
        "git_revision": _git_revision(),
        "python": sys.version.split()[0],
        "packages": _versions(),
    }
    write_json(stage_dir / PROVENANCE, provenance, _temporary(stage_dir / PROVENANCE))
    if output is not None:
        (stage_dir / output).unlink(missing_ok=True)
    write_text(stage_dir / CONFIG, _as_yaml(config), _temporary(stage_dir / CONFIG))


def _as_yaml(config: PipelineConfig) -> str:
    settings = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return OmegaConf.to_yaml(OmegaConf.create(hide_passwords(settings)))


def was_made_with(directory: Path, config: PipelineConfig, stage: str) -> bool:
    """Returns whether a stage's folder was written with these settings, as far as they shape what is in it.

    Args:
        directory: the folder.
        config: the settings of this run. In an export, `~` hides the home.
        stage: the name of the stage.
    """
    try:
        stored = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # there is none, or it is damaged
        return False
    names, text = settings_of(stage), _as_yaml(config)

    def shown(settings: dict[str, Any]) -> str:  # as text, because 0 equals false as a value
        return str(yaml.safe_dump({name: settings.get(name) for name in names}))

    wanted = [shown(yaml.safe_load(each)) for each in (text, hide_home(text))]
    return isinstance(stored, dict) and shown(stored) in wanted


def claim_stage_dir(stage_dir: Path, config: PipelineConfig) -> None:
    """Write the provenance of a folder that has none. Several processes may call this at the same time."""
    if not _is_ours(stage_dir):
        write_provenance(stage_dir, config)


def lists(directory: Path, name: str) -> bool:
    """Returns whether a folder has provenance that lists a file among those that `replaced` wrote."""
    files = _provenance(directory).get(FILES)
    return isinstance(files, dict) and name in files


def check_replaceable(directory: Path, known: Collection[str], setting: str) -> None:
    """Refuse to replace a folder unless every file in it is as `replaced` wrote it, and none was added.

    Args:
        directory: the folder to replace.
        known: names of the files that older versions wrote, without a list of them.
        setting: name of the setting that chooses the folder, for error messages.

    Raises:
        UserError: the folder, or one of those beside it that `replaced` uses, holds files of somebody else, or the
            folder is the working directory.
    """
    if directory.resolve() == Path.cwd():
        raise UserError(
            f"{setting}: {directory} must not be the directory in which the command runs, because it is replaced as a "
            "whole, but is; set a directory inside it"
        )
    for beside in _beside(directory):
        check_stage_dir(beside, setting)
        if beside.is_symlink():
            raise UserError(f"{setting}: {beside} must not be a link, but is; move it away, or set another {setting}")
    check_stage_dir(directory, setting)
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    files: Mapping[str, Any] = _provenance(directory).get(FILES, dict.fromkeys(known))
    for path in sorted(directory.iterdir()):
        is_known = path.is_file() and (path.name in files or path.name == PROVENANCE)
        if not is_known or (files.get(path.name) is not None and files[path.name] != describe_file(path)):
            raise UserError(
                f"{setting}: {directory} must hold only the files of an earlier export to be replaced, but {path.name} "
                f"{'was changed since' if is_known else 'is none of them'}; move it away, or set another {setting}"
            )


@contextmanager
def replaced(directory: Path, config: PipelineConfig, known: Collection[str], setting: str) -> Iterator[Path]:
    """Yields a new folder that takes the place of `directory` once the block has ended without an error.

    A kill leaves `directory` as it was, absent or new. Whatever else it leaves beside it has provenance of ours, and
    the next call removes it. The arguments are those of `check_replaceable`.

    Raises:
        UserError: `check_replaceable` refuses the folder, before the block or after it.
    """
    check_replaceable(directory, known, setting)
    new, old = _beside(directory)
    if old.exists() and not directory.exists():  # a kill came between the two renames below
        old.rename(directory)
    _remove_ours(new)
    _remove_ours(old)
    write_provenance(new, config)
    try:
        yield new
        files = {path.name: describe_file(path) for path in sorted(new.iterdir()) if path.name != PROVENANCE}
        write_json(new / PROVENANCE, _provenance(new) | {FILES: files})
        check_replaceable(directory, known, setting)
    except BaseException:  # if the disk is full, the unfinished folder would keep it full
        _remove_ours(new)
        raise
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    sync(directory.parent)
    _remove_ours(old)


def require(path: Path, program: str) -> Path:
    """Returns `path`, the output of an earlier stage.

    Raises:
        StageMissing: that stage has not been run.
    """
    if not path.exists():
        raise StageMissing(f"{path}: must exist, but does not; run {program} with the same recipe and run_dir first")
    return path


def _others_file(directory: Path) -> Path | None:
    """Returns a file in a folder without provenance. Subfolders that have some, or no files, do not count."""
    if not directory.is_dir() or _is_ours(directory):
        return None
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if (found := _others_file(path)) is not None:
                return found
        elif not _is_temporary_provenance(path) and not path.name.endswith(_LOCK):
            return path
    return None


def _is_ours(directory: Path) -> bool:
    return set(_FACTS) <= _provenance(directory).keys()


def _provenance(directory: Path) -> dict[str, Any]:
    """Returns the contents of `provenance.json`, or an empty dict if there is none that can be read."""
    try:
        return read_json(directory / PROVENANCE)
    except (OSError, ValueError):
        return {}


_TEMPORARY = ".mtptrain.tmp"


def _temporary(path: Path) -> Path:
    """Returns a name unique to this process, since parts of a stage may write the file at the same time."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}{_TEMPORARY}")


def _is_temporary_provenance(path: Path) -> bool:
    return path.name.startswith(f"{PROVENANCE}.") and path.name.endswith(_TEMPORARY)


def _beside(directory: Path) -> tuple[Path, Path]:
    """Returns the folders in which a replacement is written and the replaced folder is put aside."""
    return directory.with_name(f"{directory.name}.mtptrain_new"), directory.with_name(f"{directory.name}.mtptrain_old")


def _remove_ours(directory: Path) -> None:
    """Remove a folder with provenance, which goes last, so that a kill leaves a folder that is still ours."""
    if _is_ours(directory):
        for path in directory.iterdir():
            if path.name != PROVENANCE:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (directory / PROVENANCE).unlink()
    elif directory.is_dir():
        for path in filter(_is_temporary_provenance, list(directory.iterdir())):
            path.unlink()
    with suppress(FileNotFoundError):
        directory.rmdir()


def _git_revision() -> str | None:
    """Returns the revision of mtptrain's own checkout; None in a package that is installed, even inside another one."""
    try:
        result = subprocess.run(
            ["git", "--git-dir=.git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # git is not installed
        return None
    return result.stdout.strip() or None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # for example mtptrain in a bare checkout
            versions[package] = None
    return versions
