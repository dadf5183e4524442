"""Measures the memory of a step: the bytes of its tensors, and the resident memory of the process.

Imports only torch and the standard library, so that `speculators_worker`, which runs without mtptrain, can import it.
"""

import ctypes
import gc
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile


def tensor_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Returns the peak size in bytes of tensors during a step, excluding those that exist before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], index, event["args"]["Bytes"])
        for index, event in enumerate(events)
        if event["name"] == "[memory]"
    )
    return max(accumulate(num_bytes for *_, num_bytes in changes), default=0)


def resident_bytes(step: Callable[[], object]) -> int:
    """Returns the peak growth in bytes of the process's resident memory during a step. Works on Linux only.

    The growth depends on the allocator: glibc before 2.38 does not reuse freed aligned blocks of the same size and may
    hold up to two and a half times the memory of the tensors; jemalloc holds about as much as the tensors.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, so that only the step counts
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
