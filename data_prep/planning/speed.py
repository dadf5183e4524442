"""How long a stage takes: at the tokens/s that were given, else by FLOPs and the peak of the GPUs."""

import time
from dataclasses import dataclass
from functools import cache

import torch

from mtptrain.config import PlannerConfig


@dataclass(frozen=True)
class Speed:
    """An estimate of a stage's time."""

    tokens_per_s: float
    """Of all GPUs together."""
    seconds: float
    flops_per_token: float
    """0 where tokens/s were given."""
    basis: str
    """What the estimate stands on."""


def estimate(
    planner: PlannerConfig,
    tokens: int,
    given: float,
    flops_per_token: float,
    share: float,
    disk_rate: float,
    gpus_at_work: int,
    dtype: torch.dtype,
) -> Speed:
    """Time of `tokens`: at the tokens/s given, else FLOPs over a share of the peak, but not faster than the disk."""
    if given:
        return Speed(given, tokens / given, 0.0, "as given")
    peak, of_what = device_peak(planner, gpus_at_work, dtype)
    rate, basis = share * peak / flops_per_token, f"assuming {share:.0%} of {of_what}"
    if 0 < disk_rate < rate:
        rate, basis = disk_rate, f"held up by a disk of {planner.disk_gb_per_s:g} GB/s"
    return Speed(rate, tokens / rate, flops_per_token, basis)


def device_peak(planner: PlannerConfig, gpus_at_work: int, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of all GPUs at work, and what they are; CPU ranks share what was measured once."""
    if planner.gpu_tflops:
        return gpus_at_work * planner.gpu_tflops * 1e12, f"{gpus_at_work} x {planner.gpu_tflops:g} TFLOP/s"
    if torch.cuda.is_available():
        peak = matmul_flops_per_s(torch.device("cuda"), dtype)
        return gpus_at_work * peak, f"{gpus_at_work} x {peak / 1e12:.0f} TFLOP/s measured on {torch.cuda.get_device_name()}"
    peak = matmul_flops_per_s(torch.device("cpu"), dtype)
    return peak, f"{peak / 1e12:.2f} TFLOP/s measured on this CPU (planner.gpu_tflops plans for GPUs)"


@cache
def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Peak of matrix products on this device: the fastest of those that fit into `seconds`."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest
