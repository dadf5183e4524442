"""Ending a program with everything that it has started, torchrun's ranks among them, which have sessions of their own."""

import contextlib
import os
import signal
from pathlib import Path


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, as the loss of a node does. Linux."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, those that these have started, and so on."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
