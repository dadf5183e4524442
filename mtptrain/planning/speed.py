"""Estimates a stage's time from given tokens/s, or from its costs per token and the hardware's rates."""

from dataclasses import dataclass

import torch

from mtptrain.config import PlannerConfig
from mtptrain.training.flops import matmul_peak

MEMORY_SHARE = 0.78
"""The share of a GPU's memory bandwidth that elementwise kernels reach."""
PCIE_BYTES_PER_S = 50e9
"""Bandwidth between a GPU and host memory in one direction: PCIe 5 with 16 lanes."""


@dataclass(frozen=True)
class Speed:
    """An estimate of a stage's time."""

    tokens_per_s: float
    """Tokens per second of all GPUs together."""
    seconds: float
    flops_per_token: float
    """0 if tokens/s were given."""
    basis: str
    """Text that says what limits the speed, or that tokens/s were given."""


@dataclass(frozen=True)
class TokenCosts:
    """The costs of one token in a stage."""

    flops: float
    traffic_bytes: float
    """Bytes read from and written to GPU memory, except by matmuls and attention."""
    pcie_bytes: float
    disk_bytes: float
    writer_s: float = 0.0
    """Seconds that a rank's CPU threads take to check, encode, write and hash a token's states; 0 without writing."""


def estimate(
    planner: PlannerConfig,
    tokens: int,
    given: float,
    costs: TokenCosts,
    share: float,
    gpus_at_work: int,
    num_ranks: int,
    dtype: torch.dtype,
) -> Speed:
    """Returns the estimate for a stage, from `given` if it is not 0, otherwise from the slowest resource.

    Args:
        planner: rates of the hardware.
        tokens: number of tokens that the stage processes.
        given: tokens/s; 0 to derive them from the costs.
        costs: costs of one token.
        share: share of the peak FLOP/s that matmuls reach.
        gpus_at_work: number of GPUs that work at once.
        num_ranks: number of ranks that write states.
        dtype: dtype of the matmuls.
    """
    if given:
        return Speed(given, tokens / given, 0.0, "as given")
    peak, description = device_peak(planner, gpus_at_work, dtype)
    rates = {f"matrix products at {share:.0%} of {description}": share * peak / costs.flops}
    if planner.gpu_memory_gb_per_s:
        bandwidth = gpus_at_work * planner.gpu_memory_gb_per_s * 1e9
        memory = MEMORY_SHARE * bandwidth / max(1.0, costs.traffic_bytes)
        rates["memory traffic"] = memory
        rates["PCIe"] = gpus_at_work * PCIE_BYTES_PER_S / max(1.0, costs.pcie_bytes)
        if costs.writer_s:
            rates["the CPU that writes states"] = num_ranks / costs.writer_s
    if planner.disk_gb_per_s:
        rates[f"a disk of {planner.disk_gb_per_s:g} GB/s"] = planner.disk_gb_per_s * 1e9 / costs.disk_bytes
    return _slowest(tokens, rates, costs.flops)


def _slowest(tokens: int, rates: dict[str, float], flops_per_token: float) -> Speed:
    """Returns the estimate for the slowest resource.

    Matrix products and memory traffic alternate on a GPU, so their times add up and count as one resource. Everything
    else overlaps with them.
    """
    *_, (products, product_rate) = [item for item in rates.items() if item[0].startswith("matrix products")]
    memory_rate = rates.get("memory traffic", float("inf"))
    on_gpu = 1 / (1 / product_rate + 1 / memory_rate)
    elsewhere = {name: rate for name, rate in rates.items() if name not in (products, "memory traffic")}
    rate = min(on_gpu, *elsewhere.values(), float("inf"))
    bound = min(rates, key=lambda name: rates[name])
    if rate == on_gpu:
        bound = "memory traffic" if memory_rate < product_rate else products
    basis = f"limited by {bound}"
    if len(rates) > 1:
        alone = "; ".join(f"{name}: {each:,.0f}" for name, each in sorted(rates.items(), key=lambda item: item[1]))
        basis += f" (tokens/s that each limit alone would allow: {alone})"
    return Speed(rate, tokens / rate, flops_per_token, basis)


def device_peak(planner: PlannerConfig, gpus_at_work: int, dtype: torch.dtype) -> tuple[float, str]:
    """Returns the total peak FLOP/s of the GPUs at work, and text that describes it.

    CPU ranks share one CPU, so its rate is not multiplied.
    """
    if planner.gpu_tflops:
        return gpus_at_work * planner.gpu_tflops * 1e12, f"{gpus_at_work} x {planner.gpu_tflops:g} TFLOP/s"
    if torch.cuda.is_available():
        peak = matmul_peak(torch.device("cuda"), dtype)
        return (
            gpus_at_work * peak,
            f"{gpus_at_work} x {peak / 1e12:.0f} TFLOP/s measured on {torch.cuda.get_device_name()}",
        )
    peak = matmul_peak(torch.device("cpu"), dtype)
    return peak, f"{peak / 1e12:.3g} TFLOP/s measured on this CPU (set planner.gpu_tflops to plan for GPUs)"
