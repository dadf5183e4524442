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
    """FLOPs of the weight matmuls and attention in forward, loss and backward. Recomputation does not count."""

    per_token: int
    """For each of N tokens: its input projection, and its key and value at depth 0."""
    per_row: int
    """For each of M rows: all other weights at T depths, including the draft logits, and the teacher's logits."""
    per_pair: int
    """For each pair of a row and a token that it attends to, at all depths."""

    @staticmethod
    def of(head: Head, vocab_size: int, depths: int) -> "StepFlops":
        """Returns the FLOPs of a head over T depths: for each weight, 2 in the forward pass and 4 in the backward pass.

        The target's states need no gradient, so an input projection that reads them without a norm in between costs
        only 2 in the backward pass. A head with `mask_hidden` projects one input for all its later depths; this is not
        counted.
        """
        weights = {
            name: module.weight.numel() for name, module in head.named_modules() if isinstance(module, nn.Linear)
        }
        hidden_size = int(head.self_attn.o_proj.out_features)
        own_vocab = weights.pop("lm_head", None)
        first = sum(  # weights of `combine` or `fuse`
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

    A CPU without bf16 instructions may need a minute for one such product. It is measured with [256, 256] matrices,
    which it multiplies at the same rate.
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
