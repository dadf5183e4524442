"""The interface between the decoding loop and its drafters, which read `Verified` rows: the drafts that they return."""

from dataclasses import dataclass
from typing import Protocol

import torch

from mtptrain.decoding.sampler import Sampler
from mtptrain.target.model import Verified


@dataclass(frozen=True)
class Draft:
    """P proposed tokens per sequence: a chain, where P = K, or a tree whose branches have at most K tokens."""

    tokens: torch.Tensor  # [B, P]
    is_proposed: torch.Tensor
    """bool[B, P]: False for padding, where a sequence has fewer proposals."""
    probs: torch.Tensor | None = None
    """Distributions that the tokens of a chain were sampled from [B, K, V]; None if they were chosen greedily."""
    parents: torch.Tensor | None = None
    """For a tree, the index of the token that each token follows [B, P]: lower than its own, or -1 for the newest token
    of the sequence. The children of a token are all different. None for a chain."""
    logits: tuple[torch.Tensor, ...] | None = None
    """For a head's chain, the logits of each depth over the head's own vocabulary: K tensors [B, D]."""

    def ancestors(self) -> torch.Tensor:
        """Returns bool[B, i, j]: whether row j is row i or its ancestor.

        Row 0 is the newest token of the sequence, row 1 + p is draft p."""
        batch_size, num_drafts = self.tokens.shape
        device = self.tokens.device
        if self.parents is None:
            return (
                torch.ones(num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=device)
                .tril()
                .expand(batch_size, -1, -1)
            )
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
    def capture_layers(self) -> tuple[int, ...]:
        """The target's residual streams that the drafter reads."""

    @property
    def draft_slots(self) -> int:
        """Cache slots that a draft needs after the sequence: K for a chain, at least P for a tree."""

    def start(self, batch_size: int, num_slots: int) -> None:
        """Forget all sequences and prepare for a new batch."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        """Propose continuations of each sequence.

        Args:
            verified: the rows that the target has just read.
            sampler: the object that verification also uses. A copy would draw the same random numbers again.
        """
