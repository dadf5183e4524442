"""The base class of heads that are one decoder layer, applied once per depth."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.base import DepthStates, Drafted, FirstStates, Head
from mtptrain.heads.layers import Attention
from mtptrain.heads.packing import PackedTokens
from mtptrain.target.causal_attention import causal_attention
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache, TreeSlots
from mtptrain.utils.compile import fused


class LayerHead(Head):
    """One decoder layer that is applied once per depth.

    A subclass builds its layers in `__init__` and implements `combine` (before attention) and `finish` (after it);
    `fuse` and `resolve_capture_layers` are optional. Training (`forward`) and inference (`draft_first`, `draft_next`)
    run the same methods.
    """

    mask_hidden: nn.Parameter | None
    """Learned state [L, H] that every depth after 0 reads, if one forward drafts all depths. None if each depth reads
    the state and the token of the previous one."""
    mask_token_id: int | None = None
    """Token whose embedding the depths after 0 read together with `mask_hidden`."""
    zero_first_embedding: bool = False
    """Whether zeros replace the embedding at position 0."""
    self_attn: Attention
    """The layer's attention; every subclass must set it."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        self.mask_hidden = None

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states that depth 0 reads [..., H], from the streams of `read_layers` [..., L, H].

        Without such layers it is given the target's last hidden states [..., H]. The default requires L = 1.
        """
        return target_states.squeeze(-2) if self.read_layers else target_states

    @abstractmethod
    def combine(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the residual stream [..., H] and the input of `self_attn` [..., input size].

        The hidden states are at depth 0 the result of `fuse`, and later what the previous depth fed back [..., H]; the
        embeddings are those of the token after each position [..., H].
        """

    @abstractmethod
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> DepthStates:
        """Compute the rest of the decoder layer from its residual stream and the output of `self_attn` [..., H]."""

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        """Training: compute the states [T, M, H] of all depths at the draft positions; see `Head.forward`.

        Draft position t attends to the depth-0 keys of its document up to t, and to its own keys of depths 1 .. k.
        """
        # 1. Split the tokens into draft positions and all others, which only provide keys and values at depth 0.
        packing = tokens.packing
        assert packing.depths_share_targets, "the next draft position must be the next token"
        hidden_states, other_states = packing.split(self._run(self._fuse, tokens.target_states))  # [M, H], [N - M, H]
        embeddings, other_embeddings = packing.split(parts.embed(tokens.next_ids))
        positions, other_positions = packing.split(packing.positions)
        num_drafts = len(positions)
        embeddings = F.pad(embeddings, (0, 0, 0, ttt_steps - 1))  # [M + T - 1, H]
        mask = None if self.mask_hidden is None else self._mask_inputs(parts)
        states, own_keys, own_values = [], [], []
        for depth in range(ttt_steps):
            # 2. Combine the states with the embeddings, shifted by one token per depth, and project them. Past the end
            # of a span the embedding is that of another one: such drafts do not count (`Batch.is_draft`).
            shifted = embeddings[depth : depth + num_drafts]
            if depth > 0 and mask is not None:
                hidden_states, shifted = mask  # one state [1, H] for all positions
            residual, query, own_key, own_value = self._run(self._project, hidden_states, shifted, positions + depth)
            # 3. Depth 0 provides the keys of all tokens. Each later depth adds one key per draft position.
            if depth == 0:
                others = self._run(self._keys_values, other_states, other_embeddings, other_positions)
                key, value = (  # [N, kv heads, head_dim]
                    torch.cat(pair) for pair in zip((own_key, own_value), others, strict=True)
                )
            else:
                own_keys.append(own_key)
                own_values.append(own_value.expand_as(own_key))
            # 4. Attend, compute the rest of the layer, and feed its states back.
            attended = depth_attention(query, key, value, own_keys, own_values, packing)  # [M, heads, head_dim]
            depth_states, hidden_states = self._run(self._finish, residual, attended)
            states.append(depth_states)
        return torch.stack(states)

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Run depth 0 over the verified tokens; see `Head.draft_first`.

        A head with `mask_hidden` drafts all other depths in the same forward: K - 1 mask tokens follow the one at
        `verified.last_index`, in place of the rejected or padding tokens there. Their keys go to slots after the newest
        token, which the next round overwrites.
        """
        fused, next_tokens = self.fuse(verified.states.read_by(self.read_layers)), verified.next_tokens  # [B, S, H]
        embeddings, positions, last_index = parts.embed(next_tokens), verified.positions, verified.last_index
        num_masks = 0
        if self.mask_hidden is not None:
            num_masks = num_drafts - 1
            fused, embeddings = (F.pad(x, (0, 0, 0, num_masks)) for x in (fused, embeddings))  # [B, S + K - 1, H]
            indices = torch.arange(fused.shape[1], device=fused.device)
            positions = positions[:, :1] + indices
            is_mask = (indices > last_index[:, None])[..., None]
            fused, embeddings = (
                torch.where(is_mask, mask, x)
                for mask, x in zip(self._mask_inputs(parts), (fused, embeddings), strict=True)
            )
        states, fed_back = self.decode(fused, embeddings, positions, cache)  # [B, S, H]
        sequences = torch.arange(len(states), device=states.device)
        drafting = last_index[:, None] + torch.arange(1 + num_masks, device=states.device)  # [B, P]
        return FirstStates(states[sequences[:, None], drafting], fed_back[sequences, last_index])

    def draft_next(self, drafted: Drafted, parts: FrozenParts, cache: PositionCache) -> DepthStates:
        return self.decode(drafted.fed_back, parts.embed(drafted.tokens), drafted.positions, cache, drafted.tree)

    def decode(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        tree: TreeSlots | None = None,
    ) -> DepthStates:
        """Inference: run one depth for S tokens of each sequence, and write their keys to the slots of their positions.

        A token attends to all cached positions up to its own; in a tree, to all slots before the tree and to those that
        the tree's mask allows. Hidden states and embeddings [B, S, H] are those of `combine`.
        """
        residual, *projected = self._project(hidden_states, embeddings, positions)
        query, key, value = (x.transpose(1, 2) for x in projected)  # [B, (kv) heads, S, head_dim]
        mask = cache.begin(positions, tree)
        keys, values = cache.update(key, value, layer_idx=0)  # [B, kv heads, slots, head_dim]
        if mask is None:
            attended = causal_attention(query, keys, values)
        else:
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return self._finish(residual, attended.transpose(1, 2))

    def _mask_inputs(self, parts: FrozenParts) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the fused state and the embedding that every depth after 0 reads, each [1, H]."""
        assert self.mask_hidden is not None and self.mask_token_id is not None
        token = torch.full((1,), self.mask_token_id, device=self.mask_hidden.device)
        return self._run(self._fuse, self.mask_hidden[None]), parts.embed(token)

    @fused
    def _fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        return self.fuse(target_states)

    @fused
    def _project(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns residual stream, queries, keys and values."""
        residual, x = self.combine(hidden_states, self._zero_first(positions, embeddings))
        return residual, self.self_attn.queries(x, positions), *self.self_attn.keys_values(x, positions)

    @fused
    def _keys_values(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, without computing queries."""
        _, x = self.combine(hidden_states, self._zero_first(positions, embeddings))
        return self.self_attn.keys_values(x, positions)

    def _zero_first(self, positions: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings, with zeros at position 0 if `zero_first_embedding` is set."""
        return torch.where(positions[..., None] == 0, 0, embeddings) if self.zero_first_embedding else embeddings

    @fused
    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> DepthStates:
        """Apply the output projection to attended values [..., heads, head_dim], then `finish`."""
        return self.finish(residual, self.self_attn.o_proj(attended.flatten(-2)))
