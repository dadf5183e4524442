"""Train, measure and export speculative-decoding draft heads for a frozen target."""

import os
import sys
from traceback import walk_tb
from types import TracebackType

_show = sys.excepthook


def _stop_importing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends the process with a one-line message if Ctrl-C interrupts an import. Programs handle later interrupts."""
    importing = any(
        frame.f_code.co_filename.startswith("<frozen importlib")
        or (frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__")
        for frame, _ in walk_tb(trace)
    )
    if not (issubclass(kind, KeyboardInterrupt) and importing):
        return _show(kind, error, trace)
    print("stopped by Ctrl-C before anything started", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = _stop_importing  # before torch, whose import takes seconds

# OpenMP reads this when torch is loaded. By default a waiting OpenMP thread spins for milliseconds. On a busy machine
# it may spin on the very core that is needed by the thread it waits for. docs/performance.md has measurements.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # noqa: E402 (its import reads what is set above)

if not torch.cuda.is_available():
    # DeepSpeed looks for its accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
