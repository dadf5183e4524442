"""Computes the attention of a decoder layer of transformers: in training at one depth, in decoding over a cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.packing import Packing
from mtptrain.target.causal_attention import causal_or_masked_attention, refuse_keywords

DEPTHS_OR_CACHE = "mtptrain_depths_or_cache"
"""The name under which `depths_or_cache_attention` is registered with transformers."""


@dataclass
class DepthKeys:
    """The keys and values that one depth of a training step reads, and those that it makes."""

    packing: Packing
    earlier: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Rotated keys and values of the depths before: first those of depth 0 of all N tokens, draft positions first, then
    those of each later depth at the M draft positions, each [N or M, kv heads, head_dim]. Empty at depth 0."""
    made: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of this depth."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Returns the attention output of rows [N or M, heads, value head_dim]; zeros where there is no draft position.

        Args:
            query: rotated queries [N or M, heads, head_dim], of all tokens at depth 0.
            key: their rotated keys [N or M, kv heads, head_dim].
            value: their values [N or M, kv heads, value head_dim], no wider than the keys.
            scaling: scale of the scores; 1 / sqrt(head_dim) by default.
        """
        head_dim, value_dim, num_drafts = query.shape[-1], value.shape[-1], len(self.packing.draft_positions)
        if scaling is not None:  # `depth_attention` scales by 1 / sqrt(head_dim)
            query = query * (scaling * head_dim**0.5)
        self.made = key, F.pad(value, (0, head_dim - value_dim))
        (keys, values), *own = (*self.earlier, self.made)
        own_keys, own_values = [each[0] for each in own], [each[1] for each in own]
        out = depth_attention(query[:num_drafts], keys, values, own_keys, own_values, self.packing)
        return F.pad(out[..., :value_dim], (0, 0, 0, 0, 0, len(query) - num_drafts))


def depths_or_cache_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    depth_keys: DepthKeys | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attends at one depth of a training step, and over a `PositionCache` in decoding.

    Args:
        module: the layer's attention.
        query: [B, heads, S, head_dim]; B = 1 with `depth_keys`.
        key: [B, kv heads, slots, head_dim].
        value: [B, kv heads, slots, value head_dim].
        attention_mask: None.
        depth_keys: the keys of a training step; None in decoding.
        scaling: scale of the scores.
        kwargs: those of `causal_or_masked_attention` in decoding; others must be among `UNUSED_KEYWORDS`.

    Returns:
        The attention output [B, S, heads, value head_dim], and None in place of attention weights.
    """
    if depth_keys is None:
        return causal_or_masked_attention(module, query, key, value, attention_mask, scaling, **kwargs)  # type: ignore[arg-type]
    refuse_keywords(module, kwargs)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, (kv) heads, head_dim]
    return depth_keys.attend(query, key, value, scaling)[None], None


AttentionInterface.register(DEPTHS_OR_CACHE, depths_or_cache_attention)
