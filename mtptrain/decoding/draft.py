"""The interface between the decoding loop and its drafters: they read `Verified` tokens and return a `Draft`."""

from dataclasses import dataclass
from typing import Protocol

import torch

from mtptrain.decoding.sampler import Sampler
from mtptrain.target.model import Verified


@dataclass(frozen=True)
class Draft:
    """P proposed tokens per sequence: a chain of P = K, a tree with branches of at most K, or nothing (P = 0)."""

    tokens: torch.Tensor  # [B, P]
    is_proposed: torch.Tensor
    """bool[B, P]: False for padding, in sequences with fewer than P proposals, and from the first draft on whose
    confidence is below the threshold."""
    probs: torch.Tensor | None = None
    """Distributions [B, K, V] that the tokens of a chain were sampled from; None if they were chosen greedily."""
    parents: torch.Tensor | None = None
    """Index of each token's parent in a tree [B, P]: lower than the token's own index, or -1 if the parent is the
    newest token of the sequence. Siblings are different tokens. None for a chain."""
    logits: tuple[torch.Tensor, ...] | None = None
    """For a chain drafted by a head, the logits of each depth over the head's own vocabulary: K tensors [B, D]."""
    confidences: torch.Tensor | None = None
    """For a chain drafted by a head that has a confidence, that of each draft f32[B, K]."""

    def ancestors(self) -> torch.Tensor:
        """Returns bool[B, P + 1, P + 1], whose entry [b, i, j] says whether token j is token i or an ancestor of it.

        Token 0 is the newest token of the sequence, token 1 + p is draft p."""
        batch_size, num_drafts = self.tokens.shape
        device = self.tokens.device
        if self.parents is None:
            chain = torch.ones(num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=device).tril()
            return chain.expand(batch_size, -1, -1)
        above = torch.eye(num_drafts + 1, device=device).repeat(batch_size, 1, 1)
        above[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        while True:  # paths of up to 1, 2, 4, ... steps
            longer = (above @ above).clamp(max=1.0)
            if torch.equal(longer, above):
                return above.bool()
            above = longer


class Drafter(Protocol):
    """Proposes tokens for a batch of sequences and keeps its own state between rounds."""

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The target's residual streams that the drafter reads."""

    @property
    def draft_slots(self) -> int:
        """Number of cache slots that a draft needs after the sequence: K for a chain, at least P for a tree."""

    def start(self, batch_size: int, num_slots: int) -> None:
        """Forget all sequences and prepare for a new batch."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        """Propose continuations of each sequence after the tokens that the target has just read.

        The sampler is the object that verification also uses; a copy would draw the same random numbers again.
        """
