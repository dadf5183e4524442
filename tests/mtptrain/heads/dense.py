"""Computes attention in training by its definition, as the reference for the fast implementation."""

from collections.abc import Sequence

import torch

from mtptrain.heads.packing import Packing


def dense_depth_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
) -> torch.Tensor:
    """Compute `depth_attention` with one mask over all pairs of draft positions and tokens."""
    key, value = key[packing.key_indices], value[packing.key_indices]
    groups = query.shape[1] // key.shape[1]
    key, value, *own = (x.repeat_interleave(groups, dim=1) for x in (key, value, *own_keys, *own_values))
    keys, values = own[: len(own_keys)], own[len(own_keys) :]
    document = (packing.positions == 0).cumsum(0)  # [N]
    tokens = torch.arange(len(key))
    is_seen = (document[packing.draft_positions, None] == document) & (
        tokens <= packing.draft_positions[:, None]
    )  # [M, N]
    scores = torch.einsum("mhd,nhd->hmn", query, key).masked_fill(~is_seen, float("-inf"))
    own_scores = [(query * own_key).sum(-1).T[..., None] for own_key in keys]  # [heads, M, 1]
    weights = (torch.cat([scores, *own_scores], -1) * query.shape[-1] ** -0.5).softmax(-1)
    out = torch.einsum("hmn,nhd->mhd", weights[..., : len(key)], value)
    for depth, own_value in enumerate(values):
        out = out + weights[..., len(key) + depth].T[..., None] * own_value
    return out
