"""Attention of heads: over the depths in training, over the cache in decoding."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F

from mtptrain.heads.attention.cpu_blocks import block_attention, block_attention_backward
from mtptrain.heads.packing import Packing, Places, Segments
from mtptrain.target.causal_attention import causal_attention
from mtptrain.target.position_cache import PositionCache, TreeRows
from mtptrain.utils.compile import fused, uses_gpu_kernels

aten = torch.ops.aten

SHORT_TOKENS = 1024
"""Of a causal segment: up to here blocks of rows take less time than a CPU's flash kernels; with tiles the backward pass does."""
HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether this CPU has them for products in bf16 (AMX)."""
MOST_BELOW = 32
"""That a score, before scaling, may lie below what is taken off it, where all count alike: beyond it bf16 has steps of a quarter."""
RUN_TOKENS = 2048
"""Of segments that a CPU takes together at most, so that their scores stay small beside everything else of a step."""


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [..., heads, head_dim] by cos and sin [..., 1, head_dim], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cache: PositionCache,
    tree: TreeRows | None = None,
) -> torch.Tensor:
    """Attention of rows [B, S, heads, head_dim] over every cached position up to their own; writes their keys first."""
    mask = cache.begin(positions, tree)
    keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), layer_idx=0)
    if mask is None:
        return causal_attention(query.transpose(1, 2), keys, values).transpose(1, 2)
    out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)  # [B, S, heads, head_dim]


def depth_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
) -> torch.Tensor:
    """Attention of one depth's rows over what an engine has cached when it drafts at that depth.

    A row sees the depth-0 keys of its document at positions up to its own, which are built from the target's states, and the
    keys that the row itself made at the depths since. Documents do not see each other.

    Args:
        query: rotated queries of depth k [M, heads, head_dim].
        key: rotated keys of depth 0, of all tokens, rows first and prompts behind them [N, kv heads, head_dim].
        value: likewise.
        own_keys: rotated keys of depths 1 .. k, each of the rows [M, kv heads, head_dim].
        own_values: likewise.
        packing: where documents and rows lie.

    Returns:
        [M, heads, head_dim].
    """
    no_keys = key.new_empty(0, len(query), *key.shape[1:])
    own = [torch.stack(list(parts)) if parts else no_keys for parts in (own_keys, own_values)]  # [k, M, kv heads, head_dim]
    out: torch.Tensor = _MergedAttention.apply(query, key, value, *own, packing)  # type: ignore[no-untyped-call]
    return out


class _MergedAttention(torch.autograd.Function):
    """Flash attention over the depth-0 keys, or blocks on a CPU, merged with the few own keys by log-sum-exp; memory is linear in N.

    The backward is exact: flash's own backward computes P = exp(QK - lse) and dS = P * (dO V - rowsum(dO * O)), so calling it with
    the *merged* output and lse gives each part of the merged softmax; the own part is the same formula by hand.
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
    ) -> torch.Tensor:
        inside, *before = packing.segments
        out, lse, *largest = _flash(query, key[inside.keys], value[inside.keys], inside)  # [M, heads, head_dim], f32[M, heads]
        for part in before:
            *found, of_part = _flash(query[part.queries], key[part.keys], value[part.keys], part)
            out[part.queries], lse[part.queries] = _merge(out[part.queries], lse[part.queries], *found)
            largest.append(of_part)
        if len(own_keys):
            out, lse = _merge_own(out, lse, query, own_keys, own_values)
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse, *largest)
        ctx.packing = packing  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, own_keys, own_values, out, lse, *largest = ctx.saved_tensors  # type: ignore[attr-defined]
        inside, *before = ctx.packing.segments  # type: ignore[attr-defined]
        grad_query = torch.zeros_like(query)
        # Sums over many answers are kept in fp32; no token is twice among the keys of one part.
        grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32 if before else None) for x in (key, value))
        for part, of_part in zip((inside, *before), largest, strict=True):
            grad, of_query, of_out, of_lse = (x[part.queries] for x in (grad_out, query, out, lse))
            found = _flash_backward(grad, of_query, key[part.keys], value[part.keys], of_out, of_lse, of_part, part)
            for whole, places, x in zip(
                (grad_query, grad_key, grad_value), (part.queries, part.keys, part.keys), found, strict=True
            ):
                _add(whole, places, x)
        grad_key, grad_value = grad_key.to(key.dtype), grad_value.to(value.dtype)
        if not len(own_keys):
            return grad_query, grad_key, grad_value, own_keys, own_values, None
        grad_query, *own_grads = _own_backward(grad_out, grad_query, query, own_keys, own_values, out, lse)
        return grad_query, grad_key, grad_value, *own_grads, None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each segment's queries [Q, heads, head_dim] over its keys [S, kv heads, head_dim], and its lse f32[Q, heads]; then about
    the largest score of each row before scaling f32[Q, heads], for a backward pass in blocks."""
    if uses_gpu_kernels(query):
        longest = [max(lengths) for lengths in zip(*segments.lengths, strict=True)]
        offsets = segments.query_offsets, segments.key_offsets
        out, lse, *_ = aten._flash_attention_forward(query, key, value, *offsets, *longest, 0.0, segments.is_causal, False)
        return out, lse.transpose(0, 1).contiguous(), lse.new_zeros(1).expand(query.shape[:2])
    out, lse, largest = query.new_empty(query.shape), *query.new_empty(2, *query.shape[:2], dtype=torch.float32).unbind()
    for queries, keys in _runs(segments):
        inputs = _batch(query, queries), _batch(key, keys), _batch(value, keys)
        if _goes_in_blocks(segments, keys) and not _has_fast_flash(query, keys):
            found = block_attention(*inputs, segments.is_causal)
        else:
            found = _flash_on_cpu(*inputs, segments.is_causal)
        for whole, of_run in zip((out, lse, largest), found, strict=True):
            _batch(whole, queries).copy_(of_run)
    return out, lse, largest


def _flash_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `block_attention`.

    Where all scores of n keys are the same, they lie log n below the lse; one that stands out lies at it. About the largest one: between,
    by a value of the dtype, so that the one that stands out is not rounded.
    """
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_of_each_head(query, key, value), 0.0, is_causal)
    num_keys = torch.arange(1 if is_causal else key.shape[2], key.shape[2] + 1)  # that each row sees, or all of them
    below = (num_keys.log() / 2 * query.shape[-1] ** 0.5).to(query.dtype)
    return out, lse, lse * query.shape[-1] ** 0.5 - below


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    largest: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value as `_flash` got them."""
    if uses_gpu_kernels(query):
        longest = [max(lengths) for lengths in zip(*segments.lengths, strict=True)]
        offsets = segments.query_offsets, segments.key_offsets
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of a dropout
        tensors = grad_out.contiguous(), query, key, value, out, lse.transpose(0, 1).contiguous()
        found = aten._flash_attention_backward(*tensors, *offsets, *longest, 0.0, segments.is_causal, unused, unused[:0])
        return found[0], found[1], found[2]
    grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    for queries, keys in _runs(segments):
        grad, of_out, of_lse, of_run = (_batch(x, queries) for x in (grad_out, out, lse, largest))
        inputs = _batch(query, queries), _batch(key, keys), _batch(value, keys)
        if _goes_in_blocks(segments, keys):
            found = block_attention_backward(grad, *inputs, of_out, of_lse, of_run, segments.is_causal)
        else:
            of_all = [x.contiguous() for x in (grad, *_of_each_head(*inputs), of_out, of_lse)]
            grad_query, *grads_of_keys = aten._scaled_dot_product_flash_attention_for_cpu_backward(*of_all, 0.0, True)
            found = grad_query, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in grads_of_keys)
        for whole, run, x in zip(grads, (queries, keys, keys), found, strict=True):
            _batch(whole, run).copy_(x)
    return grads


def _add(whole: torch.Tensor, places: Places, x: torch.Tensor) -> None:
    """To what lies at places, none of them twice."""
    part = whole[places]
    part += x
    if not isinstance(places, slice):  # a copy
        whole[places] = part


def _of_each_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With keys and values [segments, kv heads, ...] for each query head: a CPU's flash kernel knows no groups."""
    groups = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


Run = tuple[int, int, int]
"""Neighbouring segments of equal length: first row, number of segments, rows of each."""


def _runs(segments: Segments) -> Iterator[tuple[Run, Run]]:
    """Of queries and of keys, all of them in order: one kernel call of a CPU serves a run."""
    first_query = first_key = 0
    for (queries, keys), run in groupby(segments.lengths):
        left, together = len(list(run)), max(1, RUN_TOKENS // max(queries, keys, 1))
        while left:
            count = min(left, together)
            yield (first_query, count, queries), (first_key, count, keys)
            first_query, first_key, left = first_query + count * queries, first_key + count * keys, left - count


def _goes_in_blocks(segments: Segments, keys: Run) -> bool:
    return not segments.is_causal or keys[2] <= SHORT_TOKENS


def _has_fast_flash(query: torch.Tensor, keys: Run) -> bool:
    """Forward: on tiles a CPU's flash kernel takes half the time of blocks; backward it does not use them."""
    if not HAS_TILES or query.dtype != torch.bfloat16:
        return False
    return math.log(keys[2]) / 2 * query.shape[-1] ** 0.5 < MOST_BELOW


def _batch(x: torch.Tensor, run: Run) -> torch.Tensor:
    """A run of packed [Q, heads, ...], a view [segments, heads, rows, ...]."""
    first, count, length = run
    return x[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2)


@fused
def _merge(
    out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of one softmax, [M, heads, head_dim] and f32[M, heads] each."""
    whole = torch.logaddexp(lse, more_lse)
    merged = out * (lse - whole).exp()[..., None] + more_out * (more_lse - whole).exp()[..., None]
    return merged.to(out.dtype), whole


@fused
def _merge_own(
    out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the own keys of each row [k, M, kv heads, head_dim]."""
    scores = _own_scores(query, own_keys)  # [k, M, kv heads, groups]
    grouped_lse = lse.unflatten(1, scores.shape[2:])
    whole = torch.logaddexp(grouped_lse, scores.logsumexp(0))
    own = ((scores - whole).exp()[..., None] * own_values[:, :, :, None].float()).sum(0)  # [M, kv heads, groups, head_dim]
    merged = out.unflatten(1, scores.shape[2:]) * (grouped_lse - whole).exp()[..., None] + own
    return merged.flatten(1, 2).to(out.dtype), whole.flatten(1)


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
    """The own keys' part added to the gradient of the query, and the gradients of own keys and values."""
    scores = _own_scores(query, own_keys)  # [k, M, kv heads, groups]
    heads = scores.shape[2:]
    grad, grouped = grad_out.unflatten(1, heads).float(), query.unflatten(1, heads).float()  # [M, kv heads, groups, head_dim]
    probs = (scores - lse.unflatten(1, heads)).exp()
    delta = (grad * out.unflatten(1, heads).float()).sum(-1)
    grad_scores = probs * ((grad * own_values[:, :, :, None].float()).sum(-1) - delta) * query.shape[-1] ** -0.5
    of_query = grad_query + (grad_scores[..., None] * own_keys[:, :, :, None].float()).sum(0).flatten(1, 2)
    of_keys = (grad_scores[..., None] * grouped).sum(3)
    of_values = (probs[..., None] * grad).sum(3)
    return of_query.to(query.dtype), of_keys.to(own_keys.dtype), of_values.to(own_values.dtype)


def _own_scores(query: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
    """f32[k, M, kv heads, groups]."""
    grouped = query.unflatten(1, (own_keys.shape[2], -1)).float()
    return (grouped * own_keys[:, :, :, None].float()).sum(-1) * query.shape[-1] ** -0.5
