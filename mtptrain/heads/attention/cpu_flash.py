"""Computes attention of packed segments on a CPU: one call of torch's flash kernel for each run of equal segments."""

from collections.abc import Iterator
from itertools import groupby

import torch

from mtptrain.heads.packing import Segments

aten = torch.ops.aten
Batch = tuple[int, int, int]
"""Consecutive segments of equal length: first row, number of segments, number of rows in each."""


def attend_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each segment's queries [Q * rows, heads, head_dim] to its keys [S, kv heads, head_dim].

    Returns the output [Q * rows, heads, head_dim] and its log-sum-exp f32[Q * rows, heads].
    """
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    for queries, keys in _batches(segments, rows):
        inputs = _batch(query, queries), *_of_each_head(query, _batch(key, keys), _batch(value, keys))
        results = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, segments.is_causal)
        for packed, result in zip((out, lse), results, strict=True):
            _batch(packed, queries).copy_(result)
    return out, lse


def attend_on_cpu_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. The output and lse may be those of a larger softmax."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for queries, keys in _batches(segments, rows):
        batch_grad, batch_query, batch_out, batch_lse = (_batch(x, queries) for x in (grad_out, query, out, lse))
        inputs = batch_grad, batch_query, *_of_each_head(query, _batch(key, keys), _batch(value, keys)), batch_out
        tensors = [x.contiguous() for x in (*inputs, batch_lse)]
        grad_query, *others = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, segments.is_causal
        )
        grad_key, grad_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in others)
        for packed, batch, result in zip(grads, (queries, keys, keys), (grad_query, grad_key, grad_value), strict=True):
            _batch(packed, batch).copy_(result)
    return grads


def _batches(segments: Segments, rows: int) -> Iterator[tuple[Batch, Batch]]:
    """Yield all segments in order, as pairs of batches: the queries and the keys of one call."""
    first_query = first_key = 0
    for (queries, keys), equal in groupby(segments.lengths):
        count, queries = len(list(equal)), queries * rows
        yield (first_query, count, queries), (first_key, count, keys)
        first_query, first_key = first_query + count * queries, first_key + count * keys


def _batch(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """View a batch of packed rows [Q, heads, ...] as [segments, heads, rows, ...]."""
    first, count, length = batch
    return x[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _of_each_head(query: torch.Tensor, *shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Repeat keys and values for each query head: a CPU's flash kernel does not support grouped-query attention."""
    return tuple(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in shared)
