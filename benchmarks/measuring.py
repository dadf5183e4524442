"""Measures time and memory."""

import json
import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile


def fastest(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Returns the seconds of each candidate's fastest run. A candidate runs once and returns its seconds.

    Candidates take turns, so that other load on the machine affects all of them. The first turn warms up.
    """
    best = dict.fromkeys(candidates, math.inf)
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            seconds = run()
            if turn:
                best[name] = min(best[name], seconds)
    return best


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
