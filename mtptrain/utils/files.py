"""Atomic file writes: after a kill or a lost node, the path holds either the old file or the complete new one."""

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file


def publish(temporary: Path, path: Path) -> None:
    """Flush a finished file to disk, rename it to `path`, and flush the directory entry."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, temporary: Path | None = None) -> None:
    """Write a text file atomically.

    Args:
        temporary: path of the incomplete file, `path`.tmp by default. Processes that write the same file at the same
            time must each pass a different path.

    Raises:
        OSError: the file could not be written, for example because the disk is full. The temporary file is removed.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: object, temporary: Path | None = None) -> None:
    """Write a JSON file atomically, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n", temporary)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    write_tensors(temporary, tensors)
    publish(temporary, path)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors lets only the owner read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )
    path.chmod(mode)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
