"""Compares a head's distributions with the target's: their overlap, and the calibration of the head's confidence."""

from dataclasses import dataclass, field

import torch

from mtptrain.decoding.confidence import NUM_BINS, sums_by_bin
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Round
from mtptrain.heads.base import Head
from mtptrain.utils.figures import Figure, share, shares


@dataclass
class QualityFigures:
    """Means by position in the draft, and calibration. A draft counts if its round accepted all drafts before it."""

    overlap_at: list[Figure]
    """Mean of sum min(target_probs, draft_probs): the probability that a sampled draft is accepted."""
    accepted_at: list[Figure]
    """Share of the counted drafts that were accepted."""
    rounds_at: list[int]
    """Number of drafts that count at each position, at most one per round."""
    calibration: list[dict[str, Figure]]
    """Drafts in ten bins by confidence, which is that of the head if it has one, or else the probability that it gives
    its draft. Each non-empty bin has the number of drafts, their mean confidence and the share accepted. The list is
    empty for sampled drafts, which are accepted by a different rule."""
    calibration_error: float | None
    """Expected calibration error: the distance between a bin's mean confidence and its share accepted, averaged over
    drafts. None for sampled drafts, and without drafts."""
    temperature: float
    """Temperature of the distributions; 1 if the output is greedy."""


@dataclass
class DraftQuality:
    """Observes the rounds of a head that drafts chains, and accumulates sums on the head's device."""

    head: Head
    sampler: Sampler
    """The sampler of the output. If it is greedy, the distributions are compared at temperature 1."""
    vocab_size: int
    num_depths: int
    is_sampled: bool = field(default=False, init=False)
    """Whether drafts were sampled."""
    _sums: torch.Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.sampler.is_greedy:
            self.sampler = Sampler(1.0)

    def __call__(self, seen: Round) -> None:
        draft = seen.draft
        assert draft.logits is not None, "only drafts of a head have logits"
        draft_probs = self.head.over_target_vocab(  # [B, K, V]
            self.sampler.draft_probs(torch.stack(draft.logits, 1)), self.vocab_size
        )
        overlap = torch.minimum(self.sampler.probs(seen.target_logits[:, :-1]), draft_probs).sum(-1)  # [B, K]
        confidence = draft.confidences
        if confidence is None:
            confidence = draft_probs.gather(2, draft.tokens[..., None])[..., 0]
        is_reached, is_accepted = seen.outcomes()
        figures = torch.stack(
            [torch.ones_like(overlap), overlap, is_accepted.to(overlap), confidence], 2
        ).double()  # [B, K, 4]
        figures = figures * is_reached[..., None]
        self.is_sampled = draft.probs is not None
        by_bin = sums_by_bin(confidence.flatten(), figures.flatten(0, 1))
        sums = torch.cat([figures.sum(0), by_bin])  # [K + bins, 4]
        self._sums = sums if self._sums is None else self._sums + sums

    def sums(self) -> torch.Tensor:
        """Returns sums f64[K + bins, 4] by position and by bin: drafts, overlap, accepted drafts, confidence."""
        return (
            torch.zeros(self.num_depths + NUM_BINS, 4, dtype=torch.float64) if self._sums is None else self._sums.cpu()
        )

    def figures(self, sums: torch.Tensor) -> QualityFigures:
        """Returns the figures, computed from `sums` added up over all ranks."""
        by_depth, by_bin = sums[: self.num_depths], sums[self.num_depths :]
        counts, overlap, accepted, _ = by_depth.T.tolist()
        distances = (by_bin[:, 2] - by_bin[:, 3]).abs()
        names = ("drafts", "accepted", "confidence")
        rows = [(count, *shares(sums, [count] * 2)) for count, _, *sums in by_bin.tolist() if count]
        return QualityFigures(
            overlap_at=shares(overlap, counts),
            accepted_at=shares(accepted, counts),
            rounds_at=[int(count) for count in counts],
            calibration=[] if self.is_sampled else [dict(zip(names, row, strict=True)) for row in rows],
            calibration_error=None if self.is_sampled else share(float(distances.sum()), float(by_bin[:, 0].sum())),
            temperature=self.sampler.temperature,
        )
