"""Measures the peak matmul rate of a device."""

import time
from functools import cache

import torch


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of ten products of [2048, 2048] matrices, or [8192, 8192] on a GPU.

    A CPU without bf16 instructions may need a minute for one such product. Its rate is the same with [256, 256]
    matrices, so those are used instead.

    On a CPU, the time that the process itself computed counts, divided by its threads, so that other programs which
    share the cores do not lower the peak.
    """
    if device.type == "cuda":
        return _rate_of_products(8192, device, dtype)
    small = _rate_of_products(256, device, dtype)
    return small if small < SLOW_FLOPS else max(small, _rate_of_products(2048, device, dtype))


SLOW_FLOPS = 1e10
"""A CPU that reaches fewer FLOP/s with small matrices is not measured with larger ones."""


def _rate_of_products(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(10):
        started = _now(device)
        a @ b
        seconds.append(_now(device) - started)
    return 2 * size**3 / min(seconds)


def _now(device: torch.device) -> float:
    """Returns the seconds that a GPU has worked, or the CPU time of this process per thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()
