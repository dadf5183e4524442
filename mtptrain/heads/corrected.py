"""Heads whose drafts depend on the draft before them: the correction of logits, and the confidence of a draft."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from mtptrain.heads.packing import PackedTokens


@dataclass(frozen=True)
class Correction:
    """A correction of the logits of drafts by the tokens before them, of low rank r: features @ weight^T."""

    features: torch.Tensor
    """[..., r]: [T, M, r] in training, [R, r] for R drafts that the loss computes at a time, [B, r] in decoding."""
    weight: torch.Tensor  # [D, r]
    num_candidates: int | None = None
    """Number of tokens that a draft chooses among, those with the largest logits. Only these are corrected, and the
    loss has a part of its own for them, `LossPart.selector`. None corrects all logits."""

    def candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids i64[R, A] and corrected logits f32[R, A] of each draft's A candidates, for features [R, r].

        The sum is in fp32, as in engines: in bf16, scores would often be equal.
        """
        assert self.num_candidates is not None
        largest, ids = logits.topk(self.num_candidates, -1)
        changes = (self.weight[ids] @ self.features[..., None])[..., 0]
        return ids, largest.float() + changes.float()


class Corrected(ABC):
    """A head that corrects the logits of each draft by the token before it. It drafts all tokens in one forward."""

    @abstractmethod
    def correction(self, tokens: PackedTokens, states: torch.Tensor) -> Correction:
        """Training: returns what the tokens before each draft add to its logits.

        The token before the draft of depth k at position t is token t + 1 + k of the data. `states` are the result
        [T, M, H] of `forward` for `tokens`.
        """

    @abstractmethod
    def corrected(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Inference: returns a draft's logits [B, D], corrected by the token before it, a target id i64[B].

        A head that chooses each draft among candidates returns -inf for all other tokens. `logits` are those of the
        draft's states [B, H].
        """


class Confident(ABC):
    """A head that says how likely each draft is to be accepted. Its own part of the loss is `LossPart.confidence`."""

    @abstractmethod
    def confidence(self, states: torch.Tensor, correction: Correction) -> torch.Tensor:
        """Training: returns for each draft the logit [T, M] of the probability to be accepted if all before it are."""

    @abstractmethod
    def confidence_of(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Inference: returns for each draft the probability f32[B] to be accepted if all before it are."""

    @abstractmethod
    def calibrate(self, scale: float, shift: float) -> None:
        """Let the logit z of each confidence be scale * z + shift from now on."""
