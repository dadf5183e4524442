"""What every head has in common.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, M rows that draft, H hidden size, L captured layers, V target vocabulary,
D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from mtptrain.fusing import fused
from mtptrain.heads.attention import Packing, cached_attention, depth_attention, take_rows
from mtptrain.target import FrozenParts, PositionCache, TreeRows

if TYPE_CHECKING:
    from mtptrain.heads.layers import Attention

R = TypeVar("R")
FourTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    start_from_target: bool = False
    """Start the layer as the target's last one, and let it pass the target's states on: trains several times faster at first."""


class Head(nn.Module, ABC):
    """A draft head: one class per file, listed in `HEADS`.

    A head says how it starts from the target's states (`fuse`), what one depth computes before and after its attention
    (`attention_inputs`, `outputs`) and what turns states into tokens (`logits`); which keys a depth sees is the same for all.
    """

    Config: ClassVar[type[Any]]
    """Of its settings, a dataclass on top of `HeadConfig`."""
    d2t: torch.Tensor | None
    """i64[D], added to a draft token's id to give the target's: of heads with a vocabulary of their own."""
    lm_head: nn.Linear | None
    """The head's own [D, H]; the target's frozen one where there is none."""
    self_attn: "Attention"
    recompute: bool = False
    """Keep the inputs of each part of a depth alone until the backward pass, and compute the rest again."""

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
    def attention_inputs(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth of rows of any leading shape, up to its attention.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [..., H].
            embeddings: of the token after each row's [..., H].

        Returns:
            The residual stream [..., H], and what queries, keys and values are projected from.
        """

    @abstractmethod
    def outputs(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of a depth.

        Args:
            residual: of `attention_inputs` [..., H].
            attended: what the queries found [..., heads * head_dim].

        Returns:
            States for `logits` [..., H], and states to feed back [..., H].
        """

    def forward(self, target_states: torch.Tensor, embeddings: Sequence[torch.Tensor], packing: Packing) -> torch.Tensor:
        """Training: the states of every depth, at the rows that draft; the other tokens give depth-0 keys and values alone.

        Args:
            target_states: what `fuse` takes, of N packed tokens [N, H] or [N, L, H].
            embeddings: of the tokens that the depths read, depth k of row t token t + 1 + k: T tensors, depth 0 of all tokens
                [N, H], then of the M rows [M, H].
            packing: where documents and rows lie.

        Returns:
            States [T, M, H]; `logits` of depth k at row t predict token t + 2 + k.
        """
        rows, positions = packing.rows, packing.positions[packing.rows]
        residual, attention_input, key, value = self._run(self._begin, target_states, embeddings[0], packing.positions)
        residual, attention_input = take_rows(residual, rows), take_rows(attention_input, rows)
        query = self._run(self.self_attn.queries, attention_input, positions)
        attended = depth_attention(query, key, value, [], [], packing)
        depth_states, recycled = self._run(self._finish, residual, attended)
        states, own_keys, own_values = [depth_states], [], []
        for depth, depth_embeddings in enumerate(embeddings[1:], start=1):
            residual, query, own_key, own_value = self._run(self._project, recycled, depth_embeddings, positions + depth)
            own_keys.append(own_key)
            own_values.append(own_value)
            attended = depth_attention(query, key, value, own_keys, own_values, packing)
            depth_states, recycled = self._run(self._finish, residual, attended)
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
        """Inference: one step of S rows per sequence; keys go into the slots of their positions.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [B, S, H].
            embeddings: of the token after each row's [B, S, H].
            positions: of the rows [B, S].
            cache: of this head.
            tree: where the rows are some of a tree, and what they see of it.

        Returns:
            As `outputs`, each [B, S, H].
        """
        residual, query, key, value = self._project(hidden_states, embeddings, positions)
        return self._finish(residual, cached_attention(query, key, value, positions, cache, tree))

    @fused
    def _begin(self, target_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor) -> FourTensors:
        """Depth 0 of all tokens: residual stream, attention input, keys, values."""
        residual, attention_input = self.attention_inputs(self.fuse(target_states), embeddings)
        return residual, attention_input, *self.self_attn.keys_values(attention_input, positions)

    @fused
    def _project(self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor) -> FourTensors:
        """One depth of rows: residual stream, query, key, value."""
        residual, attention_input = self.attention_inputs(hidden_states, embeddings)
        query = self.self_attn.queries(attention_input, positions)
        return residual, query, *self.self_attn.keys_values(attention_input, positions)

    @fused
    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of a depth, from what its queries found [..., heads, head_dim]."""
        return self.outputs(residual, attended.flatten(-2))

    def _run(self, function: Callable[..., R], *args: torch.Tensor) -> R:
        """Call; where `recompute` is set, what it computes on the way is computed again in the backward pass."""
        if not self.recompute:
            return function(*args)
        result: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

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
