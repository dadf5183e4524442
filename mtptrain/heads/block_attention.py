"""Causal attention of short segments on a CPU, in blocks of rows: products that stay in the cache, where a CPU's flash kernel
reaches a tenth of the matmul peak.

Queries, and what belongs to them, are of [segments, heads, rows, ...]; keys and values of [segments, kv heads, rows, head_dim].
"""

import torch

from mtptrain.fusing import fused

BLOCK_ROWS = 128


def block_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the queries find, and its lse in fp32 [segments, heads, rows].

    Scores are products in fp32, for bf16 would round them to it; there are but few dims to be summed over.
    """
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    grouped = query.unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim]
    wide_key, value = key.float().contiguous(), value.contiguous()
    out, lse = grouped.new_empty(grouped.shape), grouped.new_empty(grouped.shape[:-1], dtype=torch.float32)
    for first in range(0, key.shape[2], BLOCK_ROWS):
        last = first + BLOCK_ROWS
        scores = grouped[..., first:last, :].flatten(2, 3).float() @ wide_key[..., :last, :].mT
        probs, largest, total = _probs(scores, groups, first, scale, value.dtype)
        out[..., first:last, :] = (probs @ value[..., :last, :]).unflatten(2, (groups, -1))
        lse[..., first:last] = (largest + total.log()).unflatten(2, (groups, -1))
    return out.flatten(1, 2), lse.flatten(1, 2)


@fused
def _probs(
    scores: torch.Tensor, groups: int, first: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows from `first`, each of several groups [..., groups * rows, first + rows]: probabilities in `dtype`, and in fp32 the largest
    scaled score and the sum of exponentials, both [..., groups * rows].

    Rows of all blocks lie in one dimension and no more is computed of sums, so that a row stays in the cache: see `mtptrain.losses`.
    """
    flat = scores.flatten(0, -2)
    seen = torch.where(_is_seen(flat, scores.shape[-2] // groups, first), flat * scale, -torch.inf)
    largest = seen.amax(-1, keepdim=True)
    exps = (seen - largest).exp()
    total = exps.sum(-1, keepdim=True)
    probs, rows = (exps / total).to(dtype), scores.shape[:-1]
    return probs.view(scores.shape), largest.view(rows), total.view(rows)


def _is_seen(scores: torch.Tensor, num_rows: int, first: int) -> torch.Tensor:
    """Bool [n * num_rows, first + num_rows], of scores of the rows from `first`, n times behind each other."""
    rows = torch.arange(scores.shape[-2], device=scores.device) % num_rows + first
    return torch.arange(scores.shape[-1], device=scores.device) <= rows[:, None]


def block_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from what the queries found, all parts of their softmax together.

    A product in bf16 is rounded to it. Two more columns take lse off within the product, so that log p is what is rounded: p is then
    about as exact as p itself in bf16. Likewise with dO V - rowsum(dO * O).
    """
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    wide_query, wide_grad = (
        _widened(x, taken_off).unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim + 2]
        for x, taken_off in ((query, lse / scale), (grad_out, _row_products(grad_out, out)))
    )
    ones = key.new_ones(*key.shape[:-1], 2)
    wide_key, wide_value = (torch.cat([x, ones], -1) for x in (key, value))
    key = key.contiguous()
    grad_query = torch.empty_like(wide_query[..., :-2])
    grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    for first in range(0, key.shape[2], BLOCK_ROWS):
        last = first + BLOCK_ROWS
        block_query, block_grad = (x[..., first:last, :].flatten(2, 3) for x in (wide_query, wide_grad))
        probs, grad_scores = _score_grads(
            block_query @ wide_key[..., :last, :].mT, block_grad @ wide_value[..., :last, :].mT, groups, first, scale
        )
        grad_query[..., first:last, :] = (grad_scores @ key[..., :last, :]).unflatten(2, (groups, -1))
        grad_key[..., :last, :] += grad_scores.mT @ block_query[..., :-2]
        grad_value[..., :last, :] += probs.mT @ block_grad[..., :-2]
    return grad_query.flatten(1, 2), grad_key.to(key.dtype), grad_value.to(value.dtype)


@fused
def _row_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[..., D] and [..., D] -> f32[...]"""
    return (x.float() * y.float()).sum(-1)


def _widened(x: torch.Tensor, taken_off: torch.Tensor) -> torch.Tensor:
    """With what is taken off its products behind it, as two values that are added up [..., head_dim + 2].

    Not fused: the compiler leaves out a rounding that is undone.
    """
    high = (-taken_off).to(x.dtype)
    low = (-taken_off - high).to(x.dtype)
    return torch.cat([x, high[..., None], low[..., None]], -1)


@fused
def _score_grads(
    scores: torch.Tensor, grads: torch.Tensor, groups: int, first: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and gradients of scores before scaling, of rows from `first`, each of several groups.

    Args:
        scores: before scaling, less lse [..., groups * rows, first + rows].
        grads: of probabilities, less delta, of the same shape.
        groups: that the rows are repeated for.
        first: row of the segment that the block begins with.
        scale: of scores.
    """
    probs = torch.where(_is_seen(scores, scores.shape[-2] // groups, first), (scores.float() * scale).exp(), 0.0)
    return probs.to(scores.dtype), (probs * grads.float() * scale).to(scores.dtype)
