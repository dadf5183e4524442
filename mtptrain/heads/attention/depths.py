"""Computes the attention of a decoder layer of transformers: in training as its head says, in decoding over a cache.

`DepthKeys` attends at one depth of a training step. A layer with full attention uses `depth_attention`, as every other
head does. Layers with windows, chunks, sinks or soft caps store their scores, for one block of draft positions at a
time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.packing import Packing
from mtptrain.target.causal_attention import (
    FULL,
    MOST_SCORES,
    Extras,
    MaskOf,
    causal_or_masked_attention,
    refuse_keywords,
    tempered,
)

TRAINED_OR_CACHED = "mtptrain_trained_or_cached"
"""The name under which `trained_or_cached_attention` is registered with transformers."""
Attend = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float | None, Extras], torch.Tensor]
"""Attention in training, such as `DepthKeys.attend`."""


@dataclass
class DepthKeys:
    """The keys and values that one depth of a training step reads, and those that it makes."""

    packing: Packing
    positions: torch.Tensor
    """The positions of the layer's tokens, i64[N or M]."""
    mask: MaskOf
    """The earlier tokens that the layer's tokens see."""
    earlier: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Rotated keys and values of the depths before: first those of depth 0 of all N tokens, draft positions first, then
    those of each later depth at the M draft positions, each [N or M, kv heads, head_dim]. Empty at depth 0."""
    made: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of this depth."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        extras: Extras,
    ) -> torch.Tensor:
        """Returns the attention output [N or M, heads, value head_dim]; zeros at tokens that are no draft positions.

        Args:
            module: the layer's attention.
            query: rotated queries [1, heads, N or M, head_dim], of all tokens at depth 0.
            key: their rotated keys [1, kv heads, N or M, head_dim].
            value: their values [1, kv heads, N or M, value head_dim], no wider than the keys.
            scaling: scale of the scores; 1 / sqrt(head_dim) by default.
            extras: what else changes the scores.
        """
        query = tempered(module, query, self.positions[None], num_read=0)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N or M, (kv) heads, head_dim]
        head_dim, value_dim, num_drafts = query.shape[-1], value.shape[-1], len(self.packing.draft_positions)
        if scaling is not None:  # `depth_attention` scales by 1 / sqrt(head_dim)
            query = query * (scaling * head_dim**0.5)
        self.made = key, F.pad(value, (0, head_dim - value_dim))
        (keys, values), *own = (*self.earlier, self.made)
        own_keys, own_values = [each[0] for each in own], [each[1] for each in own]
        if extras or self.mask != FULL:
            out = blocks_attention(
                query[:num_drafts], keys, values, own_keys, own_values, self.packing, self.mask, extras
            )
        else:
            out = depth_attention(query[:num_drafts], keys, values, own_keys, own_values, self.packing)
        return F.pad(out[..., :value_dim], (0, 0, 0, 0, 0, len(query) - num_drafts))


def blocks_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
    mask: MaskOf,
    extras: Extras,
) -> torch.Tensor:
    """Attend at one depth as `depth_attention` does, to fewer tokens or with changed scores.

    Args:
        query: queries of depth k [M, heads, head_dim].
        keys: depth-0 keys of all tokens, draft positions first [N, kv heads, head_dim].
        values: depth-0 values in the same order [N, kv heads, head_dim].
        own_keys: keys of depths 1 .. k, each [M, kv heads, head_dim].
        own_values: values of depths 1 .. k, each [M, kv heads, head_dim].
        packing: documents and draft positions.
        mask: which earlier tokens a token sees.
        extras: what else changes the scores.

    Returns:
        The attention output [M, heads, head_dim].
    """
    drafting, outs = packing.positions[packing.draft_positions], []
    first_draft, first_token = 0, 0
    for length, count in zip(packing.document_lengths, packing.document_drafts, strict=True):
        tokens = packing.key_indices[first_token : first_token + length]
        size = max(1, MOST_SCORES // (length * query.shape[1]))
        for start in range(first_draft, first_draft + count, size):
            block = slice(start, min(start + size, first_draft + count))
            block_keys, block_values = ([each[block] for each in own] for own in (own_keys, own_values))
            attended: torch.Tensor = checkpoint(
                _attend_block, query[block], drafting[block], keys[tokens], values[tokens], block_keys, block_values,
                mask, extras, use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            outs.append(attended)
        first_draft, first_token = first_draft + count, first_token + length
    return torch.cat(outs)


def _attend_block(
    query: torch.Tensor,
    drafting: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    mask: MaskOf,
    extras: Extras,
) -> torch.Tensor:
    """Returns the output [R, heads, head_dim] of the draft positions [R] of a document.

    The document's keys and values [S, kv heads, head_dim] are those of positions 0 .. S - 1.
    """
    key_positions = torch.arange(len(keys), device=query.device)
    depths = torch.arange(1, len(own_keys) + 1, device=query.device)
    positions = (drafting + len(depths))[:, None]  # those of the queries
    of_keys = torch.cat([key_positions.expand(len(query), -1), drafting[:, None] + depths], -1)  # [R, keys]
    is_seen = (of_keys <= drafting[:, None]) | (torch.arange(of_keys.shape[1], device=query.device) >= len(keys))
    if mask.window is not None:
        is_seen &= positions - of_keys < mask.window
    if mask.chunk is not None:
        is_seen &= positions // mask.chunk == of_keys // mask.chunk
    queries = query.unflatten(1, (keys.shape[1], -1))  # [R, kv heads, groups, head_dim]
    scores = torch.einsum("rhgd,nhd->rhgn", queries, keys)
    for key in own_keys:
        scores = torch.cat([scores, torch.einsum("rhgd,rhd->rhg", queries, key)[..., None]], -1)
    scores = scores.float() * query.shape[-1] ** -0.5
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores.masked_fill(~is_seen[:, None, None], float("-inf"))
    if extras.sinks is not None:
        sinks = extras.sinks.float().view(keys.shape[1], -1)[None, ..., None]
        scores = torch.cat([scores, sinks.expand(len(query), -1, -1, 1)], -1)
    weights = scores.softmax(-1).to(values.dtype)
    out = torch.einsum("rhgn,nhd->rhgd", weights[..., : len(keys)], values)
    for depth, value in enumerate(own_values):
        out = out + weights[..., len(keys) + depth, None] * value[:, :, None]
    return out.flatten(1, 2)


def trained_or_cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attend: Attend | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attends as the head says in training, and over a `PositionCache` in decoding.

    Args:
        module: the layer's attention.
        query: [B, heads, S, head_dim]; B = 1 with `attend`.
        key: [B, kv heads, slots, head_dim].
        value: [B, kv heads, slots, value head_dim].
        attention_mask: must be None.
        attend: returns the output [S, heads, value head_dim] of a training step; None in decoding.
        scaling: scale of the scores.
        softcap: soft cap of the scores.
        s_aux: sinks of the attention heads.
        kwargs: those of `causal_or_masked_attention` in decoding; others must be among `UNUSED_KEYWORDS`.

    Returns:
        The attention output [B, S, heads, value head_dim], and None in place of attention weights.
    """
    if attend is None:
        kwargs |= {"softcap": softcap, "s_aux": s_aux}
        return causal_or_masked_attention(module, query, key, value, attention_mask, scaling, **kwargs)  # type: ignore[arg-type]
    refuse_keywords(module, {**kwargs, "attention_mask": attention_mask})
    return attend(module, query, key, value, scaling, Extras(softcap, s_aux))[None], None


AttentionInterface.register(TRAINED_OR_CACHED, trained_or_cached_attention)
