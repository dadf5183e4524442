"""Measures the peak matmul rate of a device."""

import time
from functools import cache

import torch


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of ten products of [2048, 2048] matrices, or [8192, 8192] on a GPU.

    A CPU without bf16 instructions may need a minute for one such product. Its rate is the same with [256, 256]
    matrices, so those are used instead.
    """
    if device.type == "cuda":
        return _rate_of_products(8192, device, dtype)
    small = _rate_of_products(256, device, dtype)
    return small if small < SLOW_FLOPS else _rate_of_products(2048, device, dtype)


SLOW_FLOPS = 1e10
"""A CPU that reaches fewer FLOP/s with small matrices is not measured with larger ones."""


def _rate_of_products(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
