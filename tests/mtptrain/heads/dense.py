"""Computes attention in training by its definition, as the reference for the fast implementation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from mtptrain.heads.packing import Packing

LENGTHS = [30, 9, 12]
POINTS = [np.array([0, 1, 5, 7, 8, 20]), np.array([3]), np.array([2, 3, 4, 9])]
PACKINGS: dict[str, Callable[[int | None], Packing]] = {
    "single": lambda window: Packing.of_points(LENGTHS, POINTS, window),
    "spans": lambda window: Packing.of_spans(LENGTHS, [(0, 0, 2), (0, 5, 4), (1, 3, 1), (2, 2, 9)], window),
    "one draft position": lambda window: Packing.of_points([40], [np.array([39])], window),
}
"""Packings with the segments of a window."""


def seen_tokens(packing: Packing) -> torch.Tensor:
    """Returns which tokens each draft position sees by definition, bool[M, N]."""
    document, tokens = (packing.positions == 0).cumsum(0), torch.arange(len(packing.positions))
    return (document[packing.draft_positions, None] == document) & (tokens <= packing.draft_positions[:, None])


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
    scores = torch.einsum("mhd,nhd->hmn", query, key).masked_fill(~seen_tokens(packing), float("-inf"))
    own_scores = [(query * own_key).sum(-1).T[..., None] for own_key in keys]  # [heads, M, 1]
    weights = (torch.cat([scores, *own_scores], -1) * query.shape[-1] ** -0.5).softmax(-1)
    out = torch.einsum("hmn,nhd->mhd", weights[..., : len(key)], value)
    for depth, own_value in enumerate(values):
        out = out + weights[..., len(key) + depth].T[..., None] * own_value
    return out
