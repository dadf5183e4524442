"""The base class of all heads: what the trainer, the drafters and the exports need from a head.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, M draft positions, H hidden size, L captured layers,
V target vocabulary, D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache, TreeSlots

Result = TypeVar("Result")
Tensors = dict[str, torch.Tensor]
"""Tensors by name."""
DepthStates = tuple[torch.Tensor, torch.Tensor]
"""The states of one depth that `Head.logits` reads [..., H], and those that it feeds back [..., H or wider]."""


@dataclass(frozen=True)
class FirstStates:
    """The states that a head computes from the tokens that the target has just verified."""

    states: torch.Tensor
    """The states that `Head.logits` reads [B, P, H]: those of depth 0 (P = 1), or those of all depths (P = K) from a
    head that drafts all tokens in one forward."""
    fed_back: torch.Tensor
    """The states that depth 1 reads [B, H]; wider if the head also feeds back embeddings. Not used if P = K."""


@dataclass(frozen=True)
class Drafted:
    """The input of a later depth: W tokens of each sequence that the depth before it has drafted."""

    fed_back: torch.Tensor
    """The states that that depth fed back [B, W, H or wider]."""
    tokens: torch.Tensor
    """The tokens, as target ids i64[B, W]. W is 1, or the number of tokens of a tree."""
    positions: torch.Tensor
    """i64[B, W], t + k at depth k."""
    tree: TreeSlots | None = None
    """The slots and mask of the tokens, if they form a tree."""


class Head(nn.Module, ABC):
    """A draft head. `HEADS` lists all classes.

    `forward` is the training pass. `draft_first` and `draft_next` are the inference passes: they must compute the same
    states as `forward` at the same depth, from the same inputs. `mtptrain.heads.layer_head.LayerHead` implements all
    three for heads of one decoder layer. A head whose drafts depend on the draft before them also implements what
    `mtptrain.heads.corrected` has. See docs/add_a_head.md.
    """

    Config: ClassVar[type[HeadConfig]]
    """The dataclass of the head's settings, whose class variables say what the head can do."""
    ttt_steps: int
    """T, the number of trained depths."""
    capture_layers: tuple[int, ...]
    """The residual streams of the target that extraction stores for the head: k is the stream after k layers."""
    read_layers: tuple[int, ...]
    """The residual streams that the head reads, in training and decoding. Without any, it reads post-norm states. These
    are `capture_layers`, except in a head that captures none and reads the stream after the last layer, which every
    store holds anyway."""
    d2t: torch.Tensor | None
    """i64[D]: target id minus draft id of each draft token. None if the draft vocabulary is the target's."""
    lm_head: nn.Linear | None
    """The head's own output layer [D, H]. None if it uses the target's frozen one or, in `draft_model`, its own
    embedding table."""
    context_tokens: int | None = None
    """Maximum number of tokens that the head can read, drafts included. None if it can read as many as the target."""
    activation_checkpointing: bool = False
    """Whether functions called through `_run` keep only their inputs and are recomputed in the backward pass."""
    shared_window: int | None = None
    """Number of tokens, up to the draft position, that every token of a block still sees in sliding layers:
    W - masks - 1. None for heads without such layers."""
    sliding_share: float = 0.0
    """Share of the queries of all layers that are in sliding ones."""
    drafts_per_document: int | None = None
    """Maximum number of draft positions of a document that a training step uses, chosen at random; None for all."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        """Build the head for a target, with weights drawn from torch's global generator."""
        super().__init__()
        self.register_buffer("d2t", None)
        self.lm_head = None
        self.ttt_steps = int(config.ttt_steps)
        self.capture_layers = self.read_layers = self.resolve_capture_layers(config, target_config)

    def _add_own_vocabulary(self, size: int | None, target_config: PreTrainedConfig) -> None:
        """Give the head its own lm_head [D, H] if `size` D is set, and `d2t` if D differs from V."""
        if size is None:
            return
        self.lm_head = nn.Linear(target_config.hidden_size, size, bias=False)
        if size != target_config.vocab_size:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    @classmethod
    def resolve_capture_layers(cls, config: Any, target_config: PreTrainedConfig) -> tuple[int, ...]:
        """Returns `capture_layers` of a head with these settings: none, unless a subclass overrides this."""
        return ()

    @classmethod
    def check_trainable(cls, config: Any, target_config: PreTrainedConfig) -> None:
        """Refuse settings with which the head could be built but not trained, before any long work."""

    @abstractmethod
    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        """Training: compute the states of all depths at the draft positions.

        At depth k, draft position t may read the tokens up to t + 1 + k. It attends to the same tokens as at inference.
        Returns the states [T, M, H]. `logits` of depth k at position t predict token t + 2 + k; they are meaningless if
        the span of generated tokens ends before t + 2 + k.
        """

    @abstractmethod
    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Inference: run depth 0 over the tokens that the target has just read.

        The keys of these tokens, if any, are written to `cache`. A head that drafts all tokens in one forward runs all
        depths. `num_drafts` is K.
        """

    def draft_next(self, drafted: Drafted, parts: FrozenParts, cache: PositionCache) -> DepthStates:
        """Inference: run a later depth. A head whose `draft_first` returns those of all depths does not need this."""
        raise AssertionError("draft_first returns the states of all depths")

    def output_weight(self, parts: FrozenParts) -> torch.Tensor:
        """Returns the output layer's weight: the head's own [D, H], or the target's frozen one [V, H]."""
        return parts.lm_head if self.lm_head is None else self.lm_head.weight

    def logits(self, states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
        """Returns logits over the draft vocabulary [..., D], which is the target's unless the head has its own."""
        return F.linear(states, self.output_weight(parts))

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The target's id of each draft token i64[D]; None if the vocabularies are the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Convert draft token ids to target token ids."""
        return draft_tokens if self.d2t is None else draft_tokens + self.d2t[draft_tokens]

    def over_target_vocab(self, draft_probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Convert distributions over the draft vocabulary [..., D] to distributions over the target's [..., V]."""
        ids = self.draft_token_ids
        if ids is None:
            return draft_probs
        return draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size).index_copy_(-1, ids, draft_probs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Head":
        """Cast or move the head, but keep the values of its buffers, such as rotary frequencies and biases of routers.

        Engines hold them in fp32; bf16 would round them.
        """
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            module, _, own = name.rpartition(".")
            setattr(self.get_submodule(module), own, buffer.to(self.get_buffer(name).device))
        return self

    def _run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call the function, with activation checkpointing if it is enabled."""
        if not self.activation_checkpointing:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
