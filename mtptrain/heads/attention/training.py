"""Computes a head's attention during training, over a document's depth-0 keys and the keys of later depths.

`MergedAttention` merges the parts of the softmax. `_attend` and its backward pass use torch's flash kernels.
"""

from collections.abc import Callable, Sequence

import torch

from mtptrain.heads.attention.cpu_flash import attend_on_cpu, attend_on_cpu_backward
from mtptrain.heads.packing import Indices, Packing, Segments
from mtptrain.utils.compile import fused, uses_gpu_kernels

aten = torch.ops.aten
MAX_SEGMENTS = 65_535
"""Maximum number of segments of a GPU's kernel, which are a dimension of its grid."""


def depth_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
) -> torch.Tensor:
    """Attend at one depth to the keys that an engine has cached when it drafts at that depth.

    A draft position sees the depth-0 keys of its document up to its own position, computed from the target's states,
    and its own keys of the later depths. Documents do not see each other.

    Args:
        query: rotated queries of depth k [M, heads, head_dim].
        key: rotated depth-0 keys of all tokens, draft positions first, then all others [N, kv heads, head_dim].
        value: depth-0 values, in the same order [N, kv heads, head_dim].
        own_keys: rotated keys of depths 1 .. k, each [M, kv heads, head_dim].
        own_values: values of depths 1 .. k, each [M, kv heads, head_dim].
        packing: documents and draft positions.

    Returns:
        The attention output [M, heads, head_dim].
    """
    no_keys = key.new_empty(0, len(query), *key.shape[1:])
    # [k, M, kv heads, head_dim]
    own = [torch.stack(list(parts)) if parts else no_keys for parts in (own_keys, own_values)]
    return MergedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, *own, packing, _merge_own, _own_backward
    )


class MergedAttention(torch.autograd.Function):
    """Attention to the depth-0 keys, merged by log-sum-exp with attention to the few own keys. Memory is linear in N.

    The backward pass is exact: FlashAttention's backward computes P = exp(QK - lse) and dS = P * (dO V -
    rowsum(dO * O)), so calling it with the *merged* output and lse gives the gradients of each part of the merged
    softmax. The own keys use the same formula.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,  # [M, heads, head_dim]
        key: torch.Tensor,  # [N, kv heads, head_dim]
        value: torch.Tensor,
        own_keys: torch.Tensor,  # [k, M, kv heads, head_dim]
        own_values: torch.Tensor,
        packing: Packing,
        merge: Callable[..., tuple[torch.Tensor, torch.Tensor]],  # for example `_merge_own`
        merge_backward: Callable[..., tuple[torch.Tensor, ...]],  # for example `_own_backward`
    ) -> torch.Tensor:
        out, lse = _attend_to_tokens(query, key, value, packing)
        if len(own_keys):
            out, lse = merge(out, lse, query, own_keys, own_values)
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse)
        ctx.packing, ctx.merge_backward = packing, merge_backward  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, own_keys, own_values, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        packing: Packing = ctx.packing  # type: ignore[attr-defined]
        grad_query, grad_key, grad_value = _attend_to_tokens_backward(grad_out, query, key, value, out, lse, packing)
        if not len(own_keys):
            return grad_query, grad_key, grad_value, own_keys, own_values, None, None, None  # empty, as their gradients
        grad_query, *own_grads = ctx.merge_backward(  # type: ignore[attr-defined]
            grad_out, grad_query, query, own_keys, own_values, out, lse
        )
        return grad_query, grad_key, grad_value, *own_grads, None, None, None


def _attend_to_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from draft positions [M, heads, head_dim] to the tokens that they see [N, kv heads, head_dim].

    Returns the output [M, heads, head_dim] and its log-sum-exp f32[M, heads].
    """
    # Run the first kernel, which has all draft positions, then merge the results of the others into its results.
    first, *others = packing.segments
    out, lse = _attend(query[first.queries], key[first.keys], value[first.keys], first)
    out, lse = _ordered(out, first.queries), _ordered(lse, first.queries)  # [M, heads, head_dim], f32[M, heads]
    for part in others:
        part_out, part_lse = _attend(query[part.queries], key[part.keys], value[part.keys], part)
        out[part.queries], lse[part.queries] = _merge(out[part.queries], lse[part.queries], part_out, part_lse)
    return out, lse


def _attend_to_tokens_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    packing: Packing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. The output and lse may be those of a larger softmax."""
    grad_query = torch.zeros_like(query)
    # The gradients of a key and its value are sums over the kernels that read them, and are kept in fp32. That of a
    # query is such a sum too, but keeps the query's dtype, like the output that is merged. No kernel has one twice.
    sum_dtype = torch.float32 if len(packing.segments) > 1 else None
    grad_key, grad_value = (torch.zeros_like(x, dtype=sum_dtype) for x in (key, value))
    for part in packing.segments:
        part_grad, part_query, part_out, part_lse = (x[part.queries] for x in (grad_out, query, out, lse))
        grads = _attend_backward(part_grad, part_query, key[part.keys], value[part.keys], part_out, part_lse, part)
        _add_at(grad_query, part.queries, grads[0])
        _add_at(grad_key, part.keys, grads[1])
        _add_at(grad_value, part.keys, grads[2])
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each segment's queries [Q, heads, head_dim] to its keys [S, kv heads, head_dim].

    Returns the output [Q, heads, head_dim] and its log-sum-exp f32[Q, heads].
    """
    is_on_gpu = uses_gpu_kernels(query)
    if is_on_gpu and len(segments.lengths) > MAX_SEGMENTS:
        runs = segments.runs(MAX_SEGMENTS)
        results = (_attend(query[run.queries], key[run.keys], value[run.keys], run) for run in runs)
        out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        return out, lse
    rows = _rows_per_query(query, key, segments)
    tensors = _heads_to_rows(query, rows), key, value
    if is_on_gpu:
        dropout, returns_mask = 0.0, False
        sizes = _flash_sizes(segments, rows)
        out, lse, *_ = aten._flash_attention_forward(*tensors, *sizes, dropout, segments.is_causal, returns_mask)
        lse = lse.T
    else:
        out, lse = attend_on_cpu(*tensors, segments, rows)
    return _rows_to_heads(out, rows), _rows_to_heads(lse, rows).contiguous()


def _attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. The output and lse may be those of a larger softmax."""
    is_on_gpu = uses_gpu_kernels(query)
    if is_on_gpu and len(segments.lengths) > MAX_SEGMENTS:
        results = []
        for run in segments.runs(MAX_SEGMENTS):
            q, k = run.queries, run.keys
            results.append(_attend_backward(grad_out[q], query[q], key[k], value[k], out[q], lse[q], run))
        grad_query, grad_key, grad_value = (torch.cat(parts) for parts in zip(*results, strict=True))
        return grad_query, grad_key, grad_value
    rows = _rows_per_query(query, key, segments)
    grad_rows, query_rows, out_rows, lse_rows = (_heads_to_rows(x, rows) for x in (grad_out, query, out, lse))
    tensors = grad_rows.contiguous(), query_rows, key, value, out_rows
    if is_on_gpu:
        sizes, dropout = _flash_sizes(segments, rows), 0.0
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # dropout state
        grads = aten._flash_attention_backward(
            *tensors, lse_rows.T.contiguous(), *sizes, dropout, segments.is_causal, unused, unused[:0]
        )
    else:
        grads = attend_on_cpu_backward(*tensors, lse_rows, segments, rows)
    return _rows_to_heads(grads[0], rows), grads[1], grads[2]


def _rows_per_query(query: torch.Tensor, key: torch.Tensor, segments: Segments) -> int:
    """Returns the number of query heads of each key head that become rows of the kernel.

    The rows of a segment that is not causal all see the same keys, so heads can be rows too. If they stayed heads,
    segments of few draft positions with the heads of a whole block would leave most rows of a GPU's tiles empty, and
    its backward pass would allocate sums of at least 128 rows for each segment and each of those heads.
    """
    return 1 if segments.is_causal else query.shape[1] // key.shape[1]


def _flash_sizes(segments: Segments, rows: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Returns the offsets of the rows and of the keys of segments, and the largest number of each in a segment."""
    most_queries, most_keys = segments.longest
    return segments.query_offsets * rows, segments.key_offsets, most_queries * rows, most_keys


def _heads_to_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Reshapes [Q, heads, ...] to [Q * rows, heads / rows, ...], where the query heads of a key head become rows."""
    return x if rows == 1 else x.unflatten(1, (-1, rows)).transpose(1, 2).flatten(0, 1)


def _rows_to_heads(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Reshapes [Q * rows, heads / rows, ...] to [Q, heads, ...], the inverse of `_heads_to_rows`."""
    return x if rows == 1 else x.unflatten(0, (-1, rows)).transpose(1, 2).flatten(1, 2)


def _ordered(x: torch.Tensor, indices: Indices) -> torch.Tensor:
    """Returns y with y[indices] = x, for indices that hold each place once."""
    return x if isinstance(indices, slice) else torch.empty_like(x).index_copy_(0, indices, x)


def _add_at(total: torch.Tensor, indices: Indices, x: torch.Tensor) -> None:
    """Add x to total[indices] in place. No index may occur twice."""
    part = total[indices]
    part += x
    if not isinstance(indices, slice):  # part is a copy
        total[indices] = part


@fused
def _merge(
    out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two parts of one softmax, [M, heads, head_dim] and f32[M, heads] each."""
    total_lse = torch.logaddexp(lse, more_lse)
    merged = out * (lse - total_lse).exp()[..., None] + more_out * (more_lse - total_lse).exp()[..., None]
    return merged.to(out.dtype), total_lse


@fused
def _merge_own(
    out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `out` with the attention of each draft position to its own keys [k, M, kv heads, head_dim]."""
    scores = _own_scores(query, own_keys)  # [k, M, kv heads, groups]
    grouped_lse = lse.unflatten(1, scores.shape[2:])
    total_lse = torch.logaddexp(grouped_lse, scores.logsumexp(0))
    own = ((scores - total_lse).exp()[..., None] * own_values[:, :, :, None].float()).sum(
        0
    )  # [M, kv heads, groups, head_dim]
    merged = out.unflatten(1, scores.shape[2:]) * (grouped_lse - total_lse).exp()[..., None] + own
    return merged.flatten(1, 2).to(out.dtype), total_lse.flatten(1)


@fused
def _own_backward(
    grad_out: torch.Tensor,
    grad_query: torch.Tensor,
    query: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradient of the query with the own keys' part added, and the gradients of own keys and values."""
    scores = _own_scores(query, own_keys)  # [k, M, kv heads, groups]
    heads = scores.shape[2:]
    grad, grouped = (  # [M, kv heads, groups, head_dim]
        grad_out.unflatten(1, heads).float(),
        query.unflatten(1, heads).float(),
    )
    probs = (scores - lse.unflatten(1, heads)).exp()
    delta = (grad * out.unflatten(1, heads).float()).sum(-1)
    grad_scores = probs * ((grad * own_values[:, :, :, None].float()).sum(-1) - delta) * query.shape[-1] ** -0.5
    total_grad_query = grad_query + (grad_scores[..., None] * own_keys[:, :, :, None].float()).sum(0).flatten(1, 2)
    grad_keys = (grad_scores[..., None] * grouped).sum(3)
    grad_values = (probs[..., None] * grad).sum(3)
    return total_grad_query.to(query.dtype), grad_keys.to(own_keys.dtype), grad_values.to(own_values.dtype)


def _own_scores(query: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
    """Returns the scaled scores between each query and its own keys f32[k, M, kv heads, groups]."""
    grouped = query.unflatten(1, (own_keys.shape[2], -1)).float()
    return (grouped * own_keys[:, :, :, None].float()).sum(-1) * query.shape[-1] ** -0.5
