"""Locks a folder while a program writes to it, so that two programs never mix their files."""

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtptrain.utils.errors import UserError

_held: dict[Path, int] = {}
"""Descriptors of the locks that this process holds."""


@contextmanager
def locked(path: Path, setting: str, command: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs.

    The system frees the lock when the process ends, however it ends. The file is removed after the block, and so are
    the folders that were made for it and are still empty.

    Args:
        path: the lock file, in the folder that the block writes to.
        setting: name of the setting that chooses the folder, for error messages.
        command: what this process does, for the error message of another.

    Raises:
        UserError: another process holds the lock.
    """
    made = [each for each in path.parents if not each.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    _held[path] = _take(path, setting, command)
    try:
        yield
    finally:
        _release(path)
        for directory in made:
            with suppress(OSError):  # it holds the output
                directory.rmdir()


def release_locks() -> None:
    """Free this process's locks for the processes that go on with its work."""
    for path in list(_held):
        _release(path)


def _take(path: Path, setting: str, command: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UserError(
                f"{setting}: {path.parent} must be written by one program at a time, but {holder} writes there; wait "
                f"until it has ended, or set another {setting}"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{setting}: {path.parent} should be on a file system with locks, but this one has none "
                f"({error.strerror}); do not start two programs that write there",
                stacklevel=2,
            )
        if _is_at(descriptor, path):  # not one that its holder removed after this process had opened it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} ({command})"[:1000].encode())
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(path: Path) -> None:
    if (descriptor := _held.pop(path, None)) is not None:
        if _is_at(descriptor, path):
            path.unlink()
        os.close(descriptor)
