"""What every head has in common.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, H hidden size, L captured layers, V target vocabulary,
D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.attention import Attend, Packing, cached_attention, depth_attention
from mtptrain.target import FrozenParts, PositionCache


@dataclass
class HeadConfig:
    """Settings that every head has."""

    name: str = ""
    ttt_steps: int = 4
    """Depths T that are trained: the head drafts this many tokens on its own states, as in serving."""
    num_attention_heads: int | None = None
    """Sizes are the target's unless set; heads so that the head dim is 64 or 128, else hidden size / 128 or / 64."""
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    init_from: str | None = None
    """Start from a published head, one's own (`run_dir/train/best`) or the MTP layer of a checkpoint: a directory or a hub name; see
    `mtptrain.warm_start`. Random weights unless set."""


class Head(nn.Module, ABC):
    """A draft head: one class per file, listed in `HEADS`.

    A head says how it starts from the target's states (`fuse`), what one depth computes (`layer`) and what turns states into
    tokens (`logits`); which keys a depth sees is the same for all.
    """

    Config: ClassVar[type[Any]]
    """Of its settings, a dataclass on top of `HeadConfig`."""
    d2t: torch.Tensor | None
    """i64[D], added to a draft token's id to give the target's: of heads with a vocabulary of their own."""
    lm_head: nn.Linear | None
    """The head's own [D, H]; the target's frozen one where there is none."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        """Build for a target, initialised from torch's global generator."""
        super().__init__()
        self.register_buffer("d2t", None)
        self.lm_head = None
        self.capture_layers = self.layers_to_capture(config, target_config)

    @classmethod
    def layers_to_capture(cls, config: Any, target_config: PreTrainedConfig) -> tuple[int, ...]:
        """Residual streams of the target that the head reads, in this order: id k is the stream after k decoder layers.

        A head without any reads the post-norm states of the last layer.
        """
        return ()

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """What depth 0 reads [..., H], from the captured streams [..., L, H], or from post-norm states [..., H] unless any are."""
        return target_states

    @abstractmethod
    def layer(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth of rows of any leading shape.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [..., H].
            embeddings: of the token after each row's [..., H].
            positions: of the rows [...].
            attend: looks up the keys that the rows see.

        Returns:
            States for `logits` [..., H], and states to feed back [..., H].
        """

    def forward(self, target_states: torch.Tensor, embeddings: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Training: the states of every depth.

        Args:
            target_states: what `fuse` takes, of N packed tokens [N, H] or [N, L, H].
            embeddings: of the tokens that the depths read [T, N, H]; depth k of row t reads token t + 1 + k.
            packing: where the documents lie.

        Returns:
            States [T, N, H]; `logits` of depth k at row t predict token t + 2 + k.
        """
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.append(key)
            values.append(value)
            return depth_attention(query, keys, values, packing)

        recycled = self.fuse(target_states)
        states = []
        for depth, depth_embeddings in enumerate(embeddings):
            depth_states, recycled = self.layer(recycled, depth_embeddings, packing.positions + depth, attend)
            states.append(depth_states)
        return torch.stack(states)

    def decode(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, cache: PositionCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inference: one step of S rows per sequence; keys go into the slots of their positions.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [B, S, H].
            embeddings: of the token after each row's [B, S, H].
            positions: of the rows [B, S].
            cache: of this head.

        Returns:
            As `layer`, each [B, S, H].
        """
        return self.layer(hidden_states, embeddings, positions, lambda q, k, v: cached_attention(q, k, v, positions, cache))

    def logits(self, states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
        """Of the head's own vocabulary, or the target's [..., D]."""
        return F.linear(states, parts.lm_head if self.lm_head is None else self.lm_head.weight)

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The target's ids of the head's vocabulary i64[D]; None where it is the target's."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids in the head's vocabulary."""
        return draft_tokens if self.d2t is None else draft_tokens + self.d2t[draft_tokens]

    def target_probs(self, draft_probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """A distribution over the head's vocabulary [..., D] as one over the target's [..., V]."""
        if self.draft_token_ids is None:
            return draft_probs
        zeros = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
        return zeros.index_copy_(-1, self.draft_token_ids, draft_probs)
