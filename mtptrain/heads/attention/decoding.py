"""Computes attention over cached keys and values, for decoding with a head of one decoder layer."""

import torch
import torch.nn.functional as F

from mtptrain.target.causal_attention import causal_attention
from mtptrain.target.position_cache import PositionCache, TreeSlots


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cache: PositionCache,
    tree: TreeSlots | None = None,
) -> torch.Tensor:
    """Write keys and values to the cache, then attend to all cached positions up to each query's own.

    With `tree`, a query attends to all slots before the tree and to the slots of the tree that its mask allows.

    Args:
        query: rotated queries [B, S, heads, head_dim].
        key: rotated keys [B, S, kv heads, head_dim].
        value: values [B, S, kv heads, head_dim].
        positions: position of each token i64[B, S].
        cache: the head's cache.
        tree: the slots and mask of the S tokens, if they belong to a tree.

    Returns:
        The attention output [B, S, heads, head_dim].
    """
    mask = cache.begin(positions, tree)
    keys, values = cache.update(  # [B, kv heads, slots, head_dim]
        key.transpose(1, 2), value.transpose(1, 2), layer_idx=0
    )
    if mask is None:
        return causal_attention(query.transpose(1, 2), keys, values).transpose(1, 2)
    out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)  # [B, S, heads, head_dim]
