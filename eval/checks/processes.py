"""Kills a program and all its descendants.

Killing the process group is not enough: torchrun's ranks are in POSIX sessions of their own."""

from contextlib import suppress

import psutil


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants, as if the node were lost."""
    with suppress(psutil.NoSuchProcess):  # it may have ended
        program = psutil.Process(pid)
        for each in [program, *program.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
