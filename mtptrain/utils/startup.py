"""Prepares the process of a program before it imports torch. Importing mtptrain as a library changes nothing."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType

from mtptrain.utils.masking import hide_passwords

SPIN_COUNT = "1000"
"""How often a waiting thread of OpenMP looks before it sleeps, in our own programs."""


_started_stage: str | None = None


def start_stage(name: str) -> None:
    """Remember which stage this process runs."""
    global _started_stage
    _started_stage = name


def started_stage() -> str | None:
    """Returns the name of the stage that this process runs, or None for any other program."""
    return _started_stage


def command() -> str:
    """Returns the command of this process as a user types it, without passwords and without torchrun."""
    spec, stage = sys.modules["__main__"].__spec__, started_stage()
    module = ["python", *([sys.argv[0]] if spec is None else ["-m", spec.name])]
    return shlex.join([*(module if stage is None else ["mtptrain", stage]), *hide_passwords(sys.argv[1:])])


def prepare_process() -> None:
    """Set how OpenMP waits, and let Ctrl-C end the imports with one line until `imports_are_done`."""
    # OpenMP reads this when torch is loaded. By default a waiting OpenMP thread spins for milliseconds. On a busy
    # machine it may spin on the very core that is needed by the thread it waits for. docs/performance.md has
    # measurements.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    _guard_imports()


@contextmanager
def guarded_imports() -> Iterator[None]:
    """Let Ctrl-C end the imports in the block with one line too."""
    _guard_imports()
    try:
        yield
    finally:
        imports_are_done()


def _guard_imports() -> None:
    if (
        threading.current_thread() is threading.main_thread()  # others cannot set handlers
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and not hasattr(sys, "ps1")  # a Python prompt or a notebook goes on after Ctrl-C
    ):
        signal.signal(signal.SIGINT, _stop_importing)


def without_own_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without our spin count: an engine must wait as it does when users start it."""
    return {name: value for name, value in environment.items() if (name, value) != ("GOMP_SPINCOUNT", SPIN_COUNT)}


def imports_are_done() -> None:
    """Restore Python's own handler of Ctrl-C. A program calls this when it starts, and handles Ctrl-C itself."""
    if signal.getsignal(signal.SIGINT) is _stop_importing:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop_importing(number: int, frame: FrameType | None) -> None:
    """Ends the process with a one-line message if Ctrl-C interrupts an import; otherwise raises KeyboardInterrupt.

    KeyboardInterrupt would not do in an import: libraries that catch it go on with half an import, and fail later.
    """
    importing = any(
        each.f_code.co_filename.startswith("<frozen importlib")
        or (each.f_code.co_name == "<module>" and each.f_globals.get("__name__") != "__main__")
        for each, _ in walk_stack(frame)
    )
    if not importing:
        signal.default_int_handler(number, frame)
    os.write(2, b"stopped by Ctrl-C before anything started\n")  # print fails if it is what the signal interrupted
    os._exit(130)
