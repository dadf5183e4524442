"""Writing files so that a kill or a lost node leaves the old file or the whole new one, never part of one."""

import os
from pathlib import Path


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, after its bytes are on the disk, and write the new directory entry to the disk too."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, temporary: Path | None = None) -> None:
    """Write a text file whole or not at all.

    Args:
        temporary: the name that it has meanwhile, where several processes may write the same file; `path`.tmp unless given.

    Raises:
        OSError: the disk is full, say; the temporary file is removed.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
