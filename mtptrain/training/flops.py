"""The FLOPs of a training step, and the peak matmul rate of a device."""

import time
from dataclasses import dataclass
from functools import cache

import torch

from mtptrain.heads.packing import Packing


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of matmuls and attention in forward, loss and backward; see `mtptrain.planning.costs.step_flops`."""

    per_token: float
    """FLOPs per packed token."""
    per_draft_position: float
    """FLOPs per draft position, at all depths."""
    per_pair: float
    """FLOPs per pair of a draft position and a token that it attends to, at all depths."""
    per_document_pair: float
    """FLOPs per pair of a token and itself or an earlier token of its document, in heads where all tokens attend."""
    sliding_share: float = 0.0
    """`Head.sliding_share`."""

    def of(self, packing: Packing) -> float:
        return (
            self.per_token * len(packing.positions)
            + self.per_draft_position * len(packing.draft_positions)
            + self.per_pair * packing.num_pairs(self.sliding_share)
            + self.per_document_pair * packing.num_document_pairs
        )


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of several products of [2048, 2048] matrices, or [8192, 8192] on a GPU.

    A CPU without bf16 instructions may need a minute for one such product. Its rate is the same with [256, 256]
    matrices, so those are used instead.

    On a CPU, the time that the process itself computed counts, divided by its threads, so that other programs which
    share the cores do not lower the peak.
    """
    if device.type == "cuda":
        return _rate_of_products(8192, device, dtype)
    small = _rate_of_products(256, device, dtype)
    return small if small < SLOW_FLOPS else max(small, _rate_of_products(2048, device, dtype))


MEASURED_S = 0.3
SLOW_FLOPS = 1e10
"""A CPU that reaches fewer FLOP/s with small matrices is not measured with larger ones."""


def _rate_of_products(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of at least ten products, which go on for `MEASURED_S` if they are short: ten
    alone, of milliseconds, may all meet another program that has the cores."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds, end = list[float](), time.perf_counter() + MEASURED_S
    while len(seconds) < 10 or time.perf_counter() < end:
        started = _now(device)
        a @ b
        seconds.append(_now(device) - started)
    return 2 * size**3 / min(seconds)


def _now(device: torch.device) -> float:
    """Returns the time in seconds once a GPU has finished its work, or the CPU time of this process per thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()
