"""Attention on a CPU in blocks: products that stay in the cache, where a CPU's flash kernel reaches a tenth to a third of the matmul peak.

Queries, and what belongs to them, are of [segments, heads, rows, ...]; keys and values of [segments, kv heads, keys, head_dim]. In a causal
segment, of as many keys as rows, row i sees keys 0 .. i; all of them otherwise.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mtptrain.utils.compile import fused

BLOCK_ROWS, KEY_MULTIPLE = 128, 32
"""Of a causal segment, whose keys are filled up: a CPU's products of odd numbers of keys take up to twice as long."""
BLOCK_SCORES, LEAST_ROWS = 2**22, 256
"""Of a block with all keys, forward where all are seen: of all heads together."""
BLOCK_KEYS, ROWS_OF_KEYS = 1024, 1024
"""Of a block in the backward pass where all keys are seen; rows of all groups."""


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the queries find, its lse, and about the largest score of each row before scaling, both in fp32 [segments, heads, rows].

    A product in bf16 is rounded to it. So there are two: what the second one rounds is how far a score lies below the largest of its row.
    """
    groups, scale, num_keys = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5, key.shape[2]
    num_heads = query.shape[0] * query.shape[1]  # of all segments, each with the same mask
    grouped = query.unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim]
    key, value = (_filled(x, is_causal) for x in (key, value))
    wide_key = _with_ones(key)
    out, of_rows = grouped.new_empty(grouped.shape), grouped.new_empty(2, *grouped.shape[:-1], dtype=torch.float32)
    of_all_heads = max(LEAST_ROWS, BLOCK_SCORES // num_keys)
    num_together = BLOCK_ROWS if is_causal else max(1, of_all_heads // num_heads)
    for first in range(0, query.shape[2], num_together):
        rows = slice(first, first + num_together)
        keys = slice(first + num_together) if is_causal else slice(num_keys)
        block_query = grouped[..., rows, :].flatten(2, 3)
        scores = block_query @ key[..., keys, :].mT
        mask = _mask(scores, groups, first) if is_causal else None
        largest = _largest(_rows_of_all(scores), mask, num_heads).view(scores.shape[:3])
        if scores.dtype == torch.float32:
            scores -= largest[..., None]
        else:
            scores = _widened(block_query, largest) @ wide_key[..., keys, :].mT
        found = _probs(_rows_of_all(scores), mask, num_heads, scale)
        probs, total = (x.view(*scores.shape[:3], *x.shape[1:]) for x in found)
        out[..., rows, :] = (probs @ value[..., keys, :]).unflatten(2, (groups, -1))
        of_rows[..., rows] = torch.stack([largest * scale + total.log(), largest]).unflatten(3, (groups, -1))
    lse, largest = of_rows.flatten(2, 3)
    return out.flatten(1, 2), lse, largest


def _filled(x: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Keys or values, contiguous; of causal segments up to a multiple, and no row sees those that are added."""
    return (F.pad(x, (0, 0, 0, -x.shape[2] % KEY_MULTIPLE)) if is_causal else x).contiguous()


def _mask(scores: torch.Tensor, groups: int, first: int) -> torch.Tensor:
    """Of a causal block that begins with row `first` [rows, keys]: 0, and -inf at keys that a row does not see."""
    return scores.new_full((scores.shape[2] // groups, scores.shape[3]), -torch.inf).triu(first + 1)


def _rows_of_all(x: torch.Tensor) -> torch.Tensor:
    """[segments, kv heads, rows, ...] with the rows of all in one dimension, for a compiled function: of a view it would count the shape of
    the whole too, and be compiled for each."""
    flat: torch.Tensor = torch.ops.aten._unsafe_view(x.contiguous(), [x.shape[:3].numel(), *x.shape[3:]])
    return flat


@fused
def _largest(scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """Of each row, in fp32; arguments as of `_probs`."""
    return _seen(scores, mask, num_heads).amax(-1)


@fused
def _probs(scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in the dtype of scores, and the sum of exponentials of each row in fp32.

    No more is computed of sums, so that a row stays in the cache: see `mtptrain.training.losses`.

    Args:
        scores: before scaling, less about the largest of their row [rows of all, keys].
        mask: [rows of a head, keys], added to those of each.
        num_heads: heads of all segments.
        scale: of scores.
    """
    exps = (_seen(scores, mask, num_heads) * scale).exp()
    total = exps.sum(-1, keepdim=True)
    return (exps / total).to(scores.dtype), total[:, 0]


def _seen(scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """Returns scores with the mask, in fp32. For `num_heads` as an argument see `mtptrain.training.losses._rows_and_grad`."""
    wide = scores.float()
    return wide if mask is None else wide + mask.expand(num_heads, -1, -1).reshape(wide.shape)


def block_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    largest: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, from what the queries found, all parts of their softmax together.

    A product in bf16 is rounded to it. Two more columns take about the largest score of a row in this part off within the product, as
    forward; likewise with dO V - rowsum(dO * O).
    """
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    wide_query, wide_grad = (
        _widened(x, taken_off).unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim + 2]
        for x, taken_off in ((query, largest), (grad_out, _row_products(grad_out, out)))
    )
    log_totals = (lse - largest * scale).unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows]
    num_keys, num_heads = key.shape[2], query.shape[0] * query.shape[1]
    key, value = (_filled(x, is_causal) for x in (key, value))
    wide_key, wide_value = _with_ones(key), _with_ones(value)
    grad_query = torch.zeros_like(wide_query[..., :-2], dtype=query.dtype if is_causal else torch.float32)  # sums of blocks in fp32
    # Keys behind each other [..., head_dim, keys]: a CPU's products take up to a third longer where the larger matrix is read across.
    grad_key, grad_value = (x.new_zeros(x.mT.shape, dtype=torch.float32) for x in (key, value))
    for rows, keys in _blocks(query.shape[2], num_keys, groups, is_causal):
        block_query, block_grad = (x[..., rows, :].flatten(2, 3) for x in (wide_query, wide_grad))
        scores, grads = block_query @ wide_key[..., keys, :].mT, block_grad @ wide_value[..., keys, :].mT
        mask = _mask(scores, groups, rows.start) if is_causal else None
        log_total = log_totals[..., rows].flatten(2, 3)
        found = _score_grads(_rows_of_all(scores), _rows_of_all(grads), _rows_of_all(log_total), mask, num_heads, scale)
        probs, grad_scores = (x.view_as(scores) for x in found)
        grad_query[..., rows, :] += (grad_scores @ key[..., keys, :]).unflatten(2, (groups, -1))
        grad_key[..., keys] += block_query[..., :-2].mT @ grad_scores
        grad_value[..., keys] += block_grad[..., :-2].mT @ probs
    of_keys, of_values = (x[..., :num_keys].mT.to(query.dtype) for x in (grad_key, grad_value))
    return grad_query.flatten(1, 2).to(query.dtype), of_keys, of_values


def _blocks(num_rows: int, num_keys: int, groups: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows, and keys that they see, until each has met all."""
    if is_causal:
        yield from ((slice(first, first + BLOCK_ROWS), slice(first + BLOCK_ROWS)) for first in range(0, num_rows, BLOCK_ROWS))
        return
    num_together = max(1, ROWS_OF_KEYS // groups)
    for first_key in range(0, num_keys, BLOCK_KEYS):
        for first in range(0, num_rows, num_together):
            yield slice(first, first + num_together), slice(first_key, first_key + BLOCK_KEYS)


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


def _with_ones(x: torch.Tensor) -> torch.Tensor:
    """What `_widened` is multiplied with."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 2)], -1)


@fused
def _score_grads(
    scores: torch.Tensor, grads: torch.Tensor, log_total: torch.Tensor, mask: torch.Tensor | None, num_heads: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and gradients of scores before scaling.

    Args:
        scores: before scaling, less about the largest of their row [rows of all, keys].
        grads: of probabilities, less delta, of the same shape.
        log_total: lse less what is taken off scaled scores f32[rows of all].
        mask: as of `_probs`.
        num_heads: as of `_probs`.
        scale: of scores.
    """
    probs = (_seen(scores, mask, num_heads) * scale - log_total[:, None]).exp()
    return probs.to(scores.dtype), (probs * grads.float() * scale).to(scores.dtype)
