"""What a step takes: the bytes of its tensors, and the resident memory of the process. Needs torch alone, for peers import it too."""

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
    """The most that tensors take during a step beyond those that are there before it."""
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
        (event["ts"], index, event["args"]["Bytes"]) for index, event in enumerate(events) if event["name"] == "[memory]"
    )
    return max(accumulate(num_bytes for *_, num_bytes in changes), default=0)


def resident_bytes(step: Callable[[], object]) -> int:
    """The most that the process takes during a step beyond what it holds before, on Linux.

    It is the allocator's figure more than the step's: glibc before 2.38 does not find freed blocks of the same size again where they are
    aligned, and then holds twice what the tensors take; with jemalloc both are the same.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back, so that what a step takes is seen
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
