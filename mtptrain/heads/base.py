"""The base class of all heads: training over depths, decoding, and the map from draft tokens to target tokens.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, M draft positions, H hidden size, L captured layers,
V target vocabulary, D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from mtptrain.heads.attention.decoding import cached_attention
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.layers import Attention
from mtptrain.heads.packing import Packing
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.position_cache import PositionCache, TreeRows
from mtptrain.utils.compile import fused

R = TypeVar("R")


class Head(nn.Module, ABC):
    """A draft head: one decoder layer that is applied once per depth. `HEADS` lists all classes.

    A subclass builds its layers in `__init__` and implements `combine` (before attention) and `finish` (after it);
    `fuse` and `layers_to_capture` are optional. `forward` (training) and `decode` (inference) run exactly these
    methods. See docs/add_a_head.md.
    """

    Config: ClassVar[type[Any]]
    """The dataclass of its settings, a subclass of `HeadConfig`."""
    d2t: torch.Tensor | None
    """i64[D]: target id minus draft id of each draft token. None unless the head has its own vocabulary."""
    lm_head: nn.Linear | None
    """The head's own output layer [D, H]. None if it uses the target's frozen one."""
    mask_hidden: nn.Parameter | None
    """State [L, H] that every depth after 0 reads, if one forward drafts all depths. None if each depth reads the
    state and the token of the previous one."""
    mask_token_id: int | None = None
    """Token whose embedding the depths after 0 read together with `mask_hidden`."""
    self_attn: Attention
    """The layer's attention; every subclass must set it."""
    activation_checkpointing: bool = False
    """Whether each part of a depth keeps only its inputs for the backward pass and recomputes the rest."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        """Build the head for a target, with weights drawn from torch's global generator."""
        super().__init__()
        self.register_buffer("d2t", None)
        self.lm_head = None
        self.mask_hidden = None
        self.capture_layers = self.layers_to_capture(config, target_config)

    @classmethod
    def layers_to_capture(cls, config: Any, target_config: PreTrainedConfig) -> tuple[int, ...]:
        """Returns the residual streams of the target that the head reads, in order: id k is the stream after k layers.

        A head that captures none reads the target's last hidden states, after the final norm.
        """
        return ()

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states that depth 0 reads [..., H].

        Args:
            target_states: captured streams [..., L, H], or the target's last hidden states [..., H] if the head
                captures none.
        """
        return target_states

    @abstractmethod
    def combine(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine hidden states and embeddings into the inputs of the decoder layer.

        Args:
            hidden_states: `fuse`d states of the target at depth 0, then those fed back by the previous depth [..., H].
            embeddings: embedding of the token after each position [..., H].

        Returns:
            The residual stream [..., H], and the input of `self_attn` [..., input size].
        """

    @abstractmethod
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the rest of the decoder layer.

        Args:
            residual: residual stream from `combine` [..., H].
            attended: output of `self_attn` [..., H].

        Returns:
            The states that `logits` reads [..., H], and the states fed back to the next depth [..., H].
        """

    def forward(
        self,
        target_states: torch.Tensor,
        embeddings: torch.Tensor,
        packing: Packing,
        ttt_steps: int,
        mask_embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Training: compute the states of all depths at the draft positions.

        At depth k, draft position t reads the embedding of the token after t + k, and attends as it will in serving: to
        the depth-0 keys of its document up to t, and to its own keys of depths 1 .. k.

        Args:
            target_states: input of `fuse` for N packed tokens [N, H] or [N, L, H].
            embeddings: embedding of the token after each packed token [N, H].
            packing: documents and draft positions.
            ttt_steps: T.
            mask_embedding: embedding [H] of `mask_token_id`, for a head that has one.

        Returns:
            States [T, M, H]. `logits` of depth k at position t predict token t + 2 + k; they are meaningless if the
            span ends before t + k.
        """
        # 1. Split the tokens into draft positions and prompt tokens, which only provide keys and values at depth 0.
        hidden_states, prompt_states = packing.split(self._run(self._fuse, target_states))  # [M, H], [N - M, H]
        embeddings, prompt_embeddings = packing.split(embeddings)
        positions, prompt_positions = packing.split(packing.positions)
        num_drafts = len(positions)
        embeddings = F.pad(embeddings, (0, 0, 0, ttt_steps - 1))  # [M + T - 1, H]
        mask_state = None if self.mask_hidden is None else self._run(self._fuse, self.mask_hidden)  # [H]
        states, own_keys, own_values = [], [], []
        for depth in range(ttt_steps):
            # 2. Combine the states with the embeddings, shifted by one token per depth, and project them.
            shifted = embeddings[depth : depth + num_drafts]
            if depth > 0 and mask_state is not None:
                assert mask_embedding is not None
                hidden_states, shifted = mask_state[None], mask_embedding[None]  # one row [1, H] for all positions
            residual, query, own_key, own_value = self._run(self._project, hidden_states, shifted, positions + depth)
            # 3. Depth 0 provides the keys of all tokens. Each later depth adds one key per draft position.
            if depth == 0:
                prompts = self._run(self._keys_values, prompt_states, prompt_embeddings, prompt_positions)
                key, value = (  # [N, kv heads, head_dim]
                    torch.cat(parts) for parts in zip((own_key, own_value), prompts, strict=True)
                )
            else:
                own_keys.append(own_key)
                own_values.append(own_value.expand_as(own_key))
            # 4. Attend, compute the rest of the layer, and feed its states back.
            attended = depth_attention(query, key, value, own_keys, own_values, packing)  # [M, heads, head_dim]
            depth_states, hidden_states = self._run(self._finish, residual, attended)
            states.append(depth_states)
        return torch.stack(states)

    def decode(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        tree: TreeRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inference: run one depth for S tokens of each sequence, and write their keys to the slots of their positions.

        Args:
            hidden_states: `fuse`d states of the target at depth 0, then those fed back by the previous depth [B, S, H].
            embeddings: embedding of the token after each position [B, S, H].
            positions: i64[B, S].
            cache: this head's cache.
            tree: the slots and mask of the S tokens, if they belong to a tree.

        Returns:
            The states that `logits` reads [B, S, H], and the states to feed back [B, S, H].
        """
        residual, query, key, value = self._project(hidden_states, embeddings, positions)
        return self._finish(residual, cached_attention(query, key, value, positions, cache, tree))

    @fused
    def _fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        return self.fuse(target_states)

    @fused
    def _project(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns residual stream, queries, keys and values."""
        residual, x = self.combine(hidden_states, embeddings)
        return residual, *self.self_attn.queries_keys_values(x, positions)

    @fused
    def _keys_values(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, without computing queries."""
        _, x = self.combine(hidden_states, embeddings)
        return self.self_attn.keys_values(x, positions)

    @fused
    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the output projection to attended values [..., heads, head_dim], then `finish`."""
        return self.finish(residual, self.self_attn.o_proj(attended.flatten(-2)))

    def _run(self, function: Callable[..., R], *args: torch.Tensor) -> R:
        """Call the function, with activation checkpointing if it is enabled."""
        if not self.activation_checkpointing:
            return function(*args)
        result: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

    def logits(self, states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
        """Returns logits over the draft vocabulary [..., D], which is the target's unless the head has its own."""
        return F.linear(states, parts.lm_head if self.lm_head is None else self.lm_head.weight)

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The target's id of each draft token i64[D]; None if the vocabularies are the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Convert draft token ids to target token ids."""
        return draft_tokens if self.d2t is None else draft_tokens + self.d2t[draft_tokens]

    def target_probs(self, draft_probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Convert distributions over the draft vocabulary [..., D] to distributions over the target's [..., V]."""
        if self.draft_token_ids is None:
            return draft_probs
        zeros = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
        return zeros.index_copy_(-1, self.draft_token_ids, draft_probs)
