"""Measures the memory of the tensors of a step.

Imports only torch and the standard library, so that `speculators_worker`, which runs without mtptrain, can import it.
"""

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
