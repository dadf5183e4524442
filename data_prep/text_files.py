"""Reads the prompt source `text_files`: each file is one document, named by its path below the listed directory."""

import os
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mtptrain.utils.errors import UserError
from mtptrain.utils.files import MAX_TEXT_BYTES

STANDARD_LIBRARY = "standard_library"
"""An entry of `prompts.paths` that stands for the source directory of the running Python's standard library."""


def standard_library_dir() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def read_text_files(
    directories: Sequence[str], pattern: str, exclude: Sequence[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the texts of all files below `directories` whose names match `pattern`, by name in the order of names.

    Also returns why a file or directory was not read, by name, or by path if the name was used before.

    Args:
        directories: paths, or `standard_library` for the running Python's standard library.
        pattern: a glob for the file's name, such as `*.py`.
        exclude: globs for the path relative to the listed directory, such as `site-packages/*`.

    Raises:
        UserError: a path is not a directory, or the pattern is not a glob for names below a directory.
    """
    texts: dict[str, str] = {}
    refused: dict[str, str] = {}

    def refuse(name: str, directory: str, reason: str) -> None:
        shown = _printable(name)
        refused[f"{directory}/{shown}" if shown in texts or shown in refused else shown] = reason

    for directory in directories:
        root = standard_library_dir() if directory == STANDARD_LIBRARY else Path(directory)
        if not root.is_dir():
            raise UserError(f"prompts.paths: must name directories, but {directory!r} is not one; correct the path")
        for name in _unreadable_directories(root):
            if not any(fnmatch(f"{name}/", glob) for glob in exclude):
                refuse(name, directory, "a directory that cannot be read")
        for path in _matching(root, pattern):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or any(fnmatch(name, glob) for glob in exclude):
                continue
            if _printable(name) != name:
                refuse(name, directory, "a name that is not UTF-8")
            elif path.stat().st_size > MAX_TEXT_BYTES:
                refuse(name, directory, f"larger than {MAX_TEXT_BYTES:,} bytes")
            elif name in texts:
                refuse(name, directory, "another directory has a file with this name")
            else:
                try:
                    texts[name] = path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    refuse(name, directory, "not UTF-8")
    return dict(sorted(texts.items())), refused


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.rglob(pattern))
    except (NotImplementedError, ValueError) as error:
        raise UserError(
            f"prompts.pattern: must be a glob for the names of files, such as *.py, but is {pattern!r} ({error}); "
            "correct it"
        ) from error


def _unreadable_directories(root: Path) -> list[str]:
    """Returns the directories below `root` that cannot be listed, relative to it. `Path.rglob` skips them silently."""
    errors: list[OSError] = []
    for _ in os.walk(root, onerror=errors.append):
        pass
    return [Path(os.fsdecode(error.filename)).relative_to(root).as_posix() for error in errors]


def _printable(name: str) -> str:
    """Returns the name with a backslash sequence for each byte that is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")
