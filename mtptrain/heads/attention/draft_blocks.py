"""Computes the attention of head `dflash` in training, where each draft position has a block of T + 1 tokens.

The tokens of a block see each other, and the tokens up to the draft position.
"""

import torch

from mtptrain.heads.attention.training import MergedAttention
from mtptrain.heads.packing import Packing
from mtptrain.utils.compile import fused


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    packing: Packing,
) -> torch.Tensor:
    """Attend from the tokens of each block to those that its draft position sees, and to the whole block.

    All tokens of a block see the same tokens. They are therefore folded into the query heads of one token, so that one
    kernel call computes the whole block and no tensor [R, N] is needed.

    Args:
        query: rotated queries of the last R tokens of each block [R, M, heads, head_dim].
        key: rotated keys of all tokens, draft positions first, then all others [N, kv heads, head_dim].
        value: values of all tokens, in the same order [N, kv heads, head_dim].
        block_key: rotated keys of all tokens of each block [T + 1, M, kv heads, head_dim].
        block_value: values of the same tokens [T + 1, M, kv heads, head_dim].
        packing: documents and draft positions.

    Returns:
        The attention output [R, M, heads, head_dim].
    """
    num_queries, kv_heads = len(query), key.shape[1]
    folded = query.unflatten(2, (kv_heads, -1)).permute(1, 2, 0, 3, 4).flatten(1, 3)  # [M, kv heads * R * groups, ...]
    out: torch.Tensor = MergedAttention.apply(  # type: ignore[no-untyped-call]
        folded, key, value, block_key, block_value, packing, _merge_block, _block_backward
    )
    return out.unflatten(1, (kv_heads, num_queries, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


@fused
def _merge_block(
    out: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, block_key: torch.Tensor, block_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `out` and `lse`, merged with the attention to the block's tokens. Products are in fp32.

    Matmuls are faster than `training._merge_own` for the tokens of a block, which share their keys, but slower for
    the few queries per key of the other heads at depth 1.
    """
    scores = _block_scores(query, block_key)  # [M, kv heads, groups, T + 1]
    grouped_lse = lse.unflatten(1, scores.shape[1:3])
    total_lse = torch.logaddexp(grouped_lse, scores.logsumexp(-1))
    inside = (scores - total_lse[..., None]).exp() @ _by_block(block_value)  # [M, kv heads, groups, head_dim]
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the query's gradient with the block's part added, and the gradients of the block's keys and values."""
    scores = _block_scores(query, block_key)  # [M, kv heads, groups, T + 1]
    heads = scores.shape[1:3]
    grad, grouped = (x.unflatten(1, heads).float() for x in (grad_out, query))  # [M, kv heads, groups, head_dim]
    probs = (scores - lse.unflatten(1, heads)[..., None]).exp()
    delta = (grad * out.unflatten(1, heads).float()).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ _by_block(block_value).mT - delta) * query.shape[-1] ** -0.5
    total_grad_query = grad_query + (grad_scores @ _by_block(block_key)).flatten(1, 2)
    grad_key, grad_value = (  # [T + 1, M, kv heads, head_dim]
        x.permute(2, 0, 1, 3).contiguous() for x in (grad_scores.mT @ grouped, probs.mT @ grad)
    )
    return total_grad_query.to(query.dtype), grad_key.to(block_key.dtype), grad_value.to(block_value.dtype)


def _block_scores(query: torch.Tensor, block_key: torch.Tensor) -> torch.Tensor:
    """Returns the scaled scores between each query and the tokens of its block f32[M, kv heads, groups, T + 1]."""
    grouped = query.unflatten(1, (block_key.shape[2], -1)).float()
    return grouped @ _by_block(block_key).mT * query.shape[-1] ** -0.5


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """Returns keys or values [T + 1, M, kv heads, head_dim] as f32[M, kv heads, T + 1, head_dim]."""
    return x.permute(1, 2, 0, 3).float()
