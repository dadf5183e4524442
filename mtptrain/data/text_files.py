"""Finds the files of the prompt source `text_files`: each is a document, named by its path below its directory."""

import os
import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mtptrain.utils.errors import UserError
from mtptrain.utils.files import MAX_TEXT_BYTES

STANDARD_LIBRARY = "standard_library"
"""An entry of `prompts.paths` that stands for the source directory of the running Python's standard library."""


def text_directory(name: str) -> Path:
    return Path(sysconfig.get_path("stdlib") if name == STANDARD_LIBRARY else name)


def find_text_files(
    directories: Sequence[str], pattern: str, exclude: Sequence[str] = ()
) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns all files below `directories` whose names match `pattern`, by name in the order of names.

    Also returns why a file or directory is not to be read, by name, or by path if the name was used before. `exclude`
    are globs for the path relative to the directory, such as `site-packages/*`.
    """
    texts: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for directory in directories:
        root = text_directory(directory)
        if not root.is_dir():
            raise UserError(f"prompts.paths: must name directories, but {directory!r} is not one; correct the path")
        unreadable: list[OSError] = []
        files = [Path(folder, name) for folder, _, names in os.walk(root, onerror=unreadable.append) for name in names]
        found: dict[str, str | None] = {}  # why a file or directory is refused
        for error in unreadable:
            found[f"{Path(error.filename).relative_to(root).as_posix()}/"] = "a directory that cannot be read"
        for path in sorted(files):
            if pattern.strip(".") and path.match(pattern) and path.is_file():
                found[path.relative_to(root).as_posix()] = None
        for name, reason in found.items():
            if any(fnmatch(name, glob) for glob in exclude):
                continue
            shown = os.fsencode(name).decode(errors="backslashreplace")
            if reason is None and shown != name:
                reason = "a name that is not UTF-8"
            elif reason is None and name in texts:
                reason = "another directory has a file with this name"
            elif reason is None and (root / name).stat().st_size > MAX_TEXT_BYTES:
                reason = f"larger than {MAX_TEXT_BYTES:,} bytes"
            if reason is None:
                texts[name] = root / name
            else:
                refused[f"{directory}/{shown}" if shown in texts or shown in refused else shown] = reason
    if not texts and not refused:
        raise UserError(
            f"prompts.pattern: must match a file below {', '.join(directories)}, but {pattern!r} matches none that "
            f"prompts.exclude={[*exclude]} keeps; correct these settings or prompts.paths"
        )
    return dict(sorted(texts.items())), refused


def read_text_files(
    directories: Sequence[str], pattern: str, exclude: Sequence[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the texts of the files that `find_text_files` finds, and why a file or directory was not read."""
    files, refused = find_text_files(directories, pattern, exclude)
    texts: dict[str, str] = {}
    for name, path in files.items():
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            refused[name] = "not UTF-8"
    return texts, refused
