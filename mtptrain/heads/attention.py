"""Attention of heads: over the depths in training, over the cache in decoding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtptrain.target import PositionCache

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotated query and key, and value, [..., heads, head_dim] -> what the query found [..., heads, head_dim]."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Packing:
    """Where the documents lie in N packed tokens."""

    runs: tuple[tuple[int, int, int], ...]
    """Neighbours of equal length, as (first token, number of documents, tokens of each): one attention call serves a run."""
    positions: torch.Tensor  # i64[N], of each token in its document

    @staticmethod
    def of(lengths: list[int]) -> "Packing":
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in lengths:
            if runs and runs[-1][2] == length:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return Packing(tuple(runs), torch.cat([torch.arange(length) for length in lengths]))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [..., heads, head_dim] by cos and sin [..., 1, head_dim], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def cached_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, cache: PositionCache
) -> torch.Tensor:
    """Attention of rows [B, S, heads, head_dim] over every cached position up to their own; writes their keys first."""
    mask = cache.begin(positions)
    keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), layer_idx=0)
    out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)  # [B, S, heads, head_dim]


def depth_attention(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], packing: Packing) -> torch.Tensor:
    """Attention of one depth's rows over what an engine has cached when it drafts at that depth.

    Row t sees the depth-0 keys of its document at positions up to its own, which are built from the target's states, and the
    keys that the row itself made at the depths since.

    Args:
        query: rotated queries of depth k [N, heads, head_dim].
        keys: rotated keys of depths 0 .. k, each [N, kv heads, head_dim].
        values: likewise.
        packing: where the documents lie; they do not see each other.

    Returns:
        [N, heads, head_dim].
    """
    groups = query.shape[1] // keys[0].shape[1]
    if query.device.type != "cpu":
        return dense_depth_attention(query, keys, values, packing)
    own_keys = torch.stack(keys[1:]) if len(keys) > 1 else query.new_empty(0, *keys[0].shape)  # [k, N, kv heads, head_dim]
    own_values = torch.stack(values[1:]) if len(values) > 1 else own_keys
    out: torch.Tensor = _MergedAttention.apply(  # type: ignore[no-untyped-call]
        query, _repeat(keys[0], groups), _repeat(values[0], groups), _repeat(own_keys, groups), _repeat(own_values, groups), packing
    )
    return out


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Each of the kv heads once per query head that reads it."""
    return x.repeat_interleave(groups, dim=-2) if groups > 1 else x


class _MergedAttention(torch.autograd.Function):
    """Flash attention over the depth-0 keys, merged with the few own keys by their log-sum-exp; memory is linear in N.

    The backward is exact: flash's own backward computes P = exp(QK - lse) and dS = P * (dO V - rowsum(dO * O)), so calling it with
    the *merged* output and lse gives the depth-0 part of the merged softmax; the own part is the same formula by hand.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,  # [N, heads, head_dim]
        key: torch.Tensor,  # [N, heads, head_dim]
        value: torch.Tensor,
        own_keys: torch.Tensor,  # [k, N, heads, head_dim]
        own_values: torch.Tensor,
        packing: Packing,
    ) -> torch.Tensor:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)  # [N, heads]
        for run in packing.runs:
            run_out, run_lse = _flash(_documents(query, run), _documents(key, run), _documents(value, run), 0.0, True)
            _documents(out, run).copy_(run_out)
            _documents(lse[..., None], run).copy_(run_lse[..., None])
        if len(own_keys):
            scores = _own_scores(query, own_keys)  # [k, N, heads]
            merged_lse = torch.logaddexp(lse, scores.logsumexp(0))
            own = ((scores - merged_lse).exp()[..., None] * own_values).sum(0)
            out = (out * (lse - merged_lse).exp()[..., None] + own).to(query.dtype)
            lse = merged_lse
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse)
        ctx.packing = packing  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, own_keys, own_values, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        grads = [torch.empty_like(query) for _ in range(3)]  # of query, key, value
        for run in ctx.packing.runs:  # type: ignore[attr-defined]
            inputs = [_documents(x, run) for x in (grad_out, query, key, value, out)]
            run_lse = _documents(lse[..., None], run)[..., 0].contiguous()
            for grad, run_grad in zip(grads, _flash_backward(*inputs, run_lse, 0.0, True), strict=True):
                _documents(grad, run).copy_(run_grad)
        if not len(own_keys):
            return *grads, torch.zeros_like(own_keys), torch.zeros_like(own_values), None
        probs = (_own_scores(query, own_keys) - lse).exp()  # [k, N, heads]
        delta = (grad_out.float() * out.float()).sum(-1)  # [N, heads]
        grad_scores = probs * ((grad_out * own_values).float().sum(-1) - delta) * query.shape[-1] ** -0.5
        grads[0] = (grads[0] + (grad_scores[..., None] * own_keys).sum(0)).to(query.dtype)
        grad_own_keys = (grad_scores[..., None] * query).to(query.dtype)
        grad_own_values = (probs[..., None] * grad_out).to(query.dtype)
        return *grads, grad_own_keys, grad_own_values, None


def _documents(x: torch.Tensor, run: tuple[int, int, int]) -> torch.Tensor:
    """A run of equally long documents in packed [N, heads, head_dim], as a view [documents, heads, tokens, head_dim]."""
    start, count, length = run
    return x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _own_scores(query: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
    return (query * own_keys).float().sum(-1) * query.shape[-1] ** -0.5  # [k, N, heads]


def dense_depth_attention(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], packing: Packing
) -> torch.Tensor:
    """`depth_attention` by its definition, one document at a time: the reference, and the path of devices without the CPU kernel."""
    groups = query.shape[1] // keys[0].shape[1]
    keys, values = [_repeat(key, groups) for key in keys], [_repeat(value, groups) for value in values]
    outs = []
    for first, count, length in packing.runs:
        for start in range(first, first + count * length, length):
            rows = slice(start, start + length)
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys[0][rows].float())
            future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
            own = [(query[rows].float() * key[rows].float()).sum(-1).T[..., None] for key in keys[1:]]  # [heads, length, 1]
            weights = (torch.cat([scores.masked_fill(future, float("-inf")), *own], -1) * query.shape[-1] ** -0.5).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weights[..., :length], values[0][rows].float())
            for depth, value in enumerate(values[1:]):
                out = out + weights[..., length + depth].T[..., None] * value[rows].float()
            outs.append(out.to(query.dtype))
    return torch.cat(outs)
