"""What every head has in common.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, H hidden size, L captured layers, V target vocabulary,
D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.target import PositionCache


@dataclass
class HeadConfig:
    """Settings that every head has."""

    name: str = ""
    ttt_steps: int = 4
    """Depths T that are trained: the head drafts this many tokens on its own states, as in serving."""


@dataclass(frozen=True)
class Packing:
    """Where the documents lie in N packed tokens."""

    runs: tuple[tuple[int, int, int], ...]
    """Neighbours of equal length, as (first token, number of documents, tokens of each): one attention call serves a run."""
    positions: torch.Tensor  # i64[N], of each token in its document

    @staticmethod
    def of(lengths: list[int]) -> "Packing":
        runs: list[tuple[int, int, int]] = []
        start = 0
        for length in lengths:
            if runs and runs[-1][2] == length:
                first, count, _ = runs[-1]
                runs[-1] = (first, count + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return Packing(tuple(runs), torch.cat([torch.arange(length) for length in lengths]))


class Head(nn.Module, ABC):
    """A draft head: one class per file, listed in `HEADS`."""

    Config: ClassVar[type[Any]]
    """Of its settings, a dataclass on top of `HeadConfig`."""
    capture_layers: tuple[int, ...] = ()
    """Residual streams that the head reads besides the last layer: id k is the stream after k decoder layers."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        """Build for a target, initialised from torch's global generator."""
        super().__init__()

    @abstractmethod
    def forward(self, hidden_states: torch.Tensor, embeddings: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Training: the states of every depth.

        Args:
            hidden_states: post-norm states of the target [N, H].
            embeddings: of the tokens that the depths read [T, N, H]; depth k of row t reads token t + 1 + k.
            packing: where the documents lie.

        Returns:
            States [T, N, H]; `FrozenParts.logits` of depth k at row t predicts token t + 2 + k.
        """

    @abstractmethod
    def decode(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, cache: PositionCache
    ) -> torch.Tensor:
        """Inference: one step of S rows per sequence; keys go into the slots of their positions.

        Args:
            hidden_states: post-norm states of the target, or the head's own states of the depth before [B, S, H].
            embeddings: of the token after each row's [B, S, H].
            positions: of the rows [B, S].
            cache: of this head.

        Returns:
            States [B, S, H], to take logits from and to feed back.
        """
