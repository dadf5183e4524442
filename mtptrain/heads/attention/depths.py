"""Computes the attention of a decoder layer of transformers at one depth of a training step.

A layer with full attention uses `depth_attention`, as every other
head does. Layers with windows, chunks, sinks or soft caps store their scores, for one block of draft positions at a
time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.packing import Packing
from mtptrain.target.causal_attention import (
    FULL,
    MOST_SCORES,
    Extras,
    MaskOf,
    masked_attention,
    tempered,
)


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

        Queries and keys are rotated [1, (kv) heads, N or M, head_dim], and values are no wider than keys. The scale of
        the scores is 1 / sqrt(head_dim) by default, and `extras` says what else changes them.
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

    The first arguments are those of `depth_attention`, `mask` says which earlier tokens a token sees, and `extras` what
    else changes the scores. Returns the attention output [M, heads, head_dim].
    """
    drafting, outs = packing.positions[packing.draft_positions], []
    first_draft, first_token = 0, 0
    for length, count in zip(packing.document_lengths, packing.document_drafts, strict=True):
        tokens = packing.key_indices[first_token : first_token + length]
        # A block has at most as many own keys as the document has tokens.
        size = max(1, min(MOST_SCORES // (2 * length * query.shape[1]), length // max(1, len(own_keys))))
        for start in range(first_draft, first_draft + count, size):
            block = slice(start, min(start + size, first_draft + count))
            block_keys, block_values = (
                torch.cat([document[tokens], *(each[block] for each in own)])
                for document, own in ((keys, own_keys), (values, own_values))
            )
            attended: torch.Tensor = checkpoint(
                masked_attention, *(x.transpose(0, 1)[None] for x in (query[block], block_keys, block_values)),
                _seen(drafting[block], length, len(own_keys), mask)[None, None], extras=extras,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            outs.append(attended[0].transpose(0, 1))
        first_draft, first_token = first_draft + count, first_token + length
    return torch.cat(outs)


def _seen(drafting: torch.Tensor, length: int, depth: int, mask: MaskOf) -> torch.Tensor:
    """Returns which keys the draft positions [R] of a document see at a depth k, bool[R, S + k * R].

    The keys are those of the document's tokens [S], then for each of the depths 1 .. k those of the draft positions.
    """
    tokens, rows = torch.arange(length, device=drafting.device), torch.arange(len(drafting), device=drafting.device)
    depths = torch.arange(1, depth + 1, device=drafting.device)
    is_seen = torch.cat([tokens <= drafting[:, None], rows.repeat(depth) == rows[:, None]], -1)
    queries, keys = (
        (drafting + depth)[:, None],
        torch.cat([tokens, (drafting + depths[:, None]).flatten()]),
    )  # positions
    if mask.window is not None:
        is_seen &= queries - keys < mask.window
    if mask.chunk is not None:
        is_seen &= queries // mask.chunk == keys // mask.chunk
    return is_seen
