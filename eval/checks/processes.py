"""Kills a program and all its descendants.

Killing the process group is not enough: torchrun's ranks are in POSIX sessions of their own."""

import contextlib
import os
import signal
from pathlib import Path


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants, as if the node were lost. Works on Linux only."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):  # the process has ended in the meantime
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Returns the ids of the children of `pid`, of their children, and so on."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]
