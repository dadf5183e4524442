"""Computes the attention of block drafters in training, where each draft position has a block of R tokens.

The tokens of a block see each other, and the tokens up to the draft position. In layers with a window, a token sees
only tokens less than W positions before it, so the window moves on with each token of a block.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from mtptrain.heads.attention.training import MergedAttention
from mtptrain.heads.packing import Packing
from mtptrain.utils.compile import fused


@dataclass(frozen=True)
class BlockView:
    """The keys that the tokens of blocks see."""

    packing: Packing
    """Its segments pair each draft position with the tokens that its whole block sees."""
    edge: torch.Tensor | None = None
    """Tokens that only the first tokens of a block see, as indices into the keys i64[E, M]; None if there are none."""
    mask: torch.Tensor | None = None
    """Which tokens of its block, and then which of the edge, each token of a block sees, bool[M or 1, R, R + E]; None
    if it sees its whole block and there is no edge."""


def block_view(packing: Packing, block_size: int, is_causal: bool, window: int | None) -> BlockView:
    """Returns what the tokens of blocks of R tokens see: token i of the block of draft position t is at t + 1 + i.

    The packing has documents and draft positions, and for a window W, above R, the segments of the window W - R. With
    `is_causal`, a token of a block sees only the tokens of the block up to itself.
    """
    device = packing.positions.device
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if is_causal:
        inside = inside.tril()
    if window is None:
        return BlockView(packing, mask=inside[None] if is_causal else None)
    # The whole block sees the tokens from t + 1 + R - W to t. Token i also sees those from t + 2 + i - W on.
    assert packing.window == window - block_size
    offsets = torch.arange(2 - window, 1 + block_size - window, device=device)[:, None]  # [E = R - 1, 1], from t
    edge = packing.key_indices[(packing.draft_positions + offsets).clamp(min=0)]
    is_in_document = packing.positions[packing.draft_positions] + offsets >= 0  # [E, M]
    sees_edge = torch.ones(block_size, block_size - 1, dtype=torch.bool, device=device).triu()
    mask = torch.cat([inside.expand(edge.shape[1], -1, -1), sees_edge & is_in_document.T[:, None]], 2)
    return BlockView(replace(packing, segments=packing.window_segments), edge, mask)


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    view: BlockView,
) -> torch.Tensor:
    """Attend from the tokens of each block to those that its draft position sees, and to the block.

    All tokens of a block see the same tokens, except at the edge of a window. They are therefore folded into the query
    heads of one token, so that one kernel call computes the whole block and no tensor [R, N] is needed. The tokens at
    the edge are computed with those of the block.

    Args:
        query: rotated queries of the last Q tokens of each block [Q, M, heads, head_dim].
        key: rotated keys of all tokens, draft positions first, then all others [N, kv heads, head_dim].
        value: values of all tokens, in the same order [N, kv heads, head_dim].
        block_key: rotated keys of all tokens of each block [R, M, kv heads, head_dim].
        block_value: values of the same tokens [R, M, kv heads, head_dim].
        view: what the tokens see.

    Returns:
        The attention output [Q, M, heads, head_dim].
    """
    num_queries, kv_heads = len(query), key.shape[1]
    folded = query.unflatten(2, (kv_heads, -1)).permute(1, 2, 0, 3, 4).flatten(1, 3)  # [M, kv heads * Q * groups, ...]
    if view.edge is not None:
        block_key, block_value = (
            torch.cat([part, all_tokens[view.edge]]) for part, all_tokens in ((block_key, key), (block_value, value))
        )
    mask = view.mask
    if mask is not None:  # [M or 1, 1, Q * groups, R + E]
        mask = mask[:, -num_queries:].repeat_interleave(query.shape[2] // kv_heads, 1)[:, None]
    merge, backward = partial(_merge_block, mask=mask), partial(_block_backward, mask=mask)
    out: torch.Tensor = MergedAttention.apply(  # type: ignore[no-untyped-call]
        folded, key, value, block_key, block_value, view.packing, merge, backward
    )
    return out.unflatten(1, (kv_heads, num_queries, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


@fused
def _merge_block(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `out` and `lse`, merged with the attention to the block's tokens. Products are in fp32.

    Matmuls are faster than `training._merge_own` for the tokens of a block, which share their keys, but slower for
    the few queries per key of the other heads at depth 1.
    """
    scores = _block_scores(query, block_key, mask)  # [M, kv heads, Q * groups, R + E]
    grouped_lse = lse.unflatten(1, scores.shape[1:3])
    total_lse = torch.logaddexp(grouped_lse, scores.logsumexp(-1))
    inside = (scores - total_lse[..., None]).exp() @ _by_block(block_value)  # [M, kv heads, Q * groups, head_dim]
    merged = out.unflatten(1, scores.shape[1:3]) * (grouped_lse - total_lse).exp()[..., None] + inside
    return merged.flatten(1, 2).to(out.dtype), total_lse.flatten(1)


@fused
def _block_backward(
    grad_out: torch.Tensor,
    grad_query: torch.Tensor,
    query: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the query's gradient with the block's part added, and the gradients of the block's keys and values."""
    scores = _block_scores(query, block_key, mask)  # [M, kv heads, Q * groups, R + E]
    heads = scores.shape[1:3]
    grad, grouped = (x.unflatten(1, heads).float() for x in (grad_out, query))  # [M, kv heads, Q * groups, head_dim]
    probs = (scores - lse.unflatten(1, heads)[..., None]).exp()
    delta = (grad * out.unflatten(1, heads).float()).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ _by_block(block_value).mT - delta) * query.shape[-1] ** -0.5
    total_grad_query = grad_query + (grad_scores @ _by_block(block_key)).flatten(1, 2)
    grad_key, grad_value = (  # [R + E, M, kv heads, head_dim]
        x.permute(2, 0, 1, 3).contiguous() for x in (grad_scores.mT @ grouped, probs.mT @ grad)
    )
    return total_grad_query.to(query.dtype), grad_key.to(block_key.dtype), grad_value.to(block_value.dtype)


def _block_scores(query: torch.Tensor, block_key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the scaled scores between each query and the tokens of its block f32[M, kv heads, Q * groups, R + E]."""
    grouped = query.unflatten(1, (block_key.shape[2], -1)).float()
    scores = grouped @ _by_block(block_key).mT * query.shape[-1] ** -0.5
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """Returns keys or values [R + E, M, kv heads, head_dim] as f32[M, kv heads, R + E, head_dim]."""
    return x.permute(1, 2, 0, 3).float()
