"""Prepares the process of a program before it imports torch. Importing mtptrain as a library changes nothing."""

import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper

from mtptrain.utils.masking import hide_passwords

SPIN_COUNT = "1000"
"""How often a waiting thread of OpenMP looks before it sleeps, in our own programs."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies."""


_started_stage: str | None = None
_typed_arguments: list[str] = []


def start_stage(name: str) -> None:
    global _started_stage, _typed_arguments
    _started_stage, _typed_arguments = name, sys.argv[1:]


def typed_arguments() -> list[str]:
    """Returns the arguments of the stage that this process runs, before a YAML file among them became settings."""
    return _typed_arguments


def started_stage() -> str | None:
    """Returns the name of the stage that this process runs, or None for any other program."""
    return _started_stage


def command() -> str:
    """Returns the command of this process as a user types it, without passwords and without torchrun."""
    spec, stage = sys.modules["__main__"].__spec__, started_stage()
    module = ["python", *([sys.argv[0]] if spec is None else ["-m", spec.name])]
    return shlex.join([*(module if stage is None else ["mtptrain", stage]), *hide_passwords(sys.argv[1:])])


def prepare_process() -> None:
    """Set how OpenMP waits, let a rank of torchrun end with it, and show each line of a log at once.

    A torchrun that is killed tells its ranks nothing, and those that still import would wait for each other for hours.
    OpenMP reads this when torch is loaded. By default a waiting OpenMP thread spins for milliseconds. On a busy machine
    it may spin on the very core that is needed by the thread it waits for. docs/performance.md has measurements.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def without_own_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without our spin count: an engine must wait as it does when users start it."""
    return {name: value for name, value in environment.items() if (name, value) != ("GOMP_SPINCOUNT", SPIN_COUNT)}


@contextmanager
def guarded_imports() -> Iterator[None]:
    """Let Ctrl-C end the process at once while the block imports.

    KeyboardInterrupt would not do: libraries that catch it in an import go on with half of it, and fail later.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_pythons = handler is signal.default_int_handler
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_pythons:
            signal.signal(signal.SIGINT, handler)


def print_once(line: str, variable: str) -> None:
    """Print a line to stderr once, on rank 0; an environment variable tells started programs what was printed."""
    if os.environ.get("RANK", "0") == "0" and os.environ.get(variable) != line:
        print(line, file=sys.stderr, flush=True)
        os.environ[variable] = line
