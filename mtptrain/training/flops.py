"""FLOPs of a training step by formula, and the measured peak of a device."""

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from mtptrain.heads.base import Head
from mtptrain.heads.layers import RmsNorm
from mtptrain.training.batches import Batch

INPUT_NORMS = ("enorm", "hnorm", "fc_norm", "input_norm")
"""Norms before an input projection, in the heads that have them."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward, loss and backward: products with weights, and attention. Recomputed work does not count."""

    per_token: int
    """For each of N tokens: its depth-0 key and value."""
    per_row: int
    """For each of M rows: all depths, with T drafts and one teacher."""
    per_pair: int
    """For each pair of a row and a token that it attends to, at all depths."""

    @staticmethod
    def of(head: Head, vocab_size: int, depths: int) -> "StepFlops":
        """Returns the FLOPs of a head for a target with V tokens over T depths: per weight 2 forward and 4 backward.

        The target's states need no gradient, so an input projection that reads them without a norm in between costs 2
        fewer. A head with `mask_hidden` projects the one input of its later depths once, which counts as nothing.
        """
        weights = {
            name: module.weight.numel() for name, module in head.named_modules() if isinstance(module, nn.Linear)
        }
        hidden_size = int(head.self_attn.o_proj.out_features)
        own_vocab = weights.pop("lm_head", None)
        first = sum(  # of `combine` or `fuse`
            weights.pop(name) for name in list(weights) if not name.startswith(("self_attn.", "mlp."))
        )
        keys = weights["self_attn.k_proj"] + weights["self_attn.v_proj"]
        queries = weights["self_attn.q_proj"]
        is_fused = bool(head.capture_layers)  # the input projection runs at depth 0 only
        has_bare_input = not any(
            isinstance(getattr(head, norm, None), (RmsNorm, nn.ModuleList)) for norm in INPUT_NORMS
        )
        draft = (own_vocab * 6) if own_vocab else vocab_size * hidden_size * 4
        return StepFlops(
            per_token=first * (4 if has_bare_input else 6) + keys * 6,
            per_row=depths * (6 * (sum(weights.values()) - keys - queries) + draft)
            + 6 * queries
            + (depths - 1) * (0 if head.mask_hidden is not None else 6 * ((0 if is_fused else first) + keys + queries))
            + 2 * vocab_size * hidden_size,
            per_pair=depths * 12 * int(head.self_attn.o_proj.in_features),
        )

    def of_batch(self, batch: Batch) -> float:
        """Returns the FLOPs of a step over this batch."""
        return (
            self.per_token * batch.num_tokens + self.per_row * batch.num_rows + self.per_pair * batch.packing.num_pairs
        )


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of ten products of [2048, 2048] matrices, or [8192, 8192] on a GPU.

    A CPU without bf16 instructions may need a minute for each of these. Its peak is measured with [256, 256], where it
    is as fast.
    """
    if device.type == "cuda":
        return _rate_of_products(8192, device, dtype)
    small = _rate_of_products(256, device, dtype)
    return small if small < SLOW_FLOPS else _rate_of_products(2048, device, dtype)


SLOW_FLOPS = 1e10
"""FLOP/s below which a processor is not measured with large products."""


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
