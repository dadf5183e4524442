"""Writes files atomically: after a kill or the loss of a node, either the old file or the whole new one is there."""

import os
from pathlib import Path


def publish(temporary: Path, path: Path) -> None:
    """Flush a finished file to the disk, rename it to `path`, and flush the directory entry too."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, temporary: Path | None = None) -> None:
    """Write a text file completely or not at all.

    Args:
        temporary: the file's name until it is complete, `path`.tmp by default. Processes that may write the same file need names
            of their own.

    Raises:
        OSError: the file could not be written, for instance because the disk is full. The temporary file is removed.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
