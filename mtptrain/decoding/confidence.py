"""Calibrates the confidence of a head: fits it to whether drafts are accepted.

The loss teaches a head the probability that a *sampled* draft is accepted. Decoding may be greedy, and a head is often
too sure. So the logit z of each confidence becomes scale * z + shift, with the two numbers that predict best which
drafts of validation were accepted; `Head.calibrate` folds them into the head's weights. Engines need not know of it.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from mtptrain.decoding.speculate import Round
from mtptrain.utils.figures import Figure, share

NUM_BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Two numbers that turn the logit z of a confidence into scale * z + shift, and what they change."""

    confidence_scale: float
    confidence_shift: float
    confidence_error: Figure
    """`calibration_error` after the change, over the drafts that were fitted."""
    confidence_error_before: Figure
    """`calibration_error` before the change."""


@dataclass
class Confidences:
    """Observes rounds, and keeps the confidence of each draft that was reached, and whether it was accepted."""

    _rounds: list[torch.Tensor] = field(default_factory=list, repr=False)
    """[B, K, 3] of each round: the confidences, what was accepted and what was reached."""

    def __call__(self, seen: Round) -> None:
        assert seen.draft.confidences is not None, "only drafts of a head with a confidence have one"
        is_reached, is_accepted = seen.outcomes()
        self._rounds.append(torch.stack([seen.draft.confidences.double(), is_accepted, is_reached], -1))

    def drafts(self) -> torch.Tensor:
        """Returns the confidence of each draft, and 1 if it was accepted or else 0, f64[N, 2]."""
        each = torch.cat([torch.zeros(0, 3, dtype=torch.float64), *(part.flatten(0, 1).cpu() for part in self._rounds)])
        return each[each[:, 2] > 0, :2]


def fit(drafts: torch.Tensor) -> Calibration:
    """Returns the most probable calibration for drafts f64[N, 2]; see `Confidences.drafts`.

    A weak prior, which adds (scale - 1)^2 + shift^2 to the summed loss, keeps the numbers at 1 and 0 where there are
    hardly any drafts, and finite where the confidence separates all accepted drafts from the others.
    """
    logits, accepted = drafts[:, 0].logit(eps=2.0**-25), drafts[:, 1]  # fp32 may have rounded them to 0 or 1
    change = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of scale and shift, from 1 and 0
    optimizer = torch.optim.LBFGS([change], max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def calibrated() -> torch.Tensor:
        return (1 + change[0]) * logits + change[1]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = F.binary_cross_entropy_with_logits(calibrated(), accepted, reduction="sum") + change.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():
        errors = [calibration_error(probs, accepted) for probs in (calibrated().sigmoid(), drafts[:, 0])]
    scale, shift = change.tolist()
    return Calibration(1 + scale, shift, *errors)


def calibration_error(confidences: torch.Tensor, accepted: torch.Tensor) -> Figure:
    """Returns the expected calibration error of the confidences of drafts f64[N], in bins of a tenth."""
    differences = sums_by_bin(confidences, (confidences - accepted)[:, None])
    return share(float(differences.abs().sum()), len(confidences))


def sums_by_bin(confidences: torch.Tensor, figures: torch.Tensor) -> torch.Tensor:
    """Returns the sums [bins, F] of the figures [N, F] of drafts whose confidence is in each tenth."""
    bins = (confidences * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    return figures.new_zeros(NUM_BINS, figures.shape[1]).index_add_(0, bins, figures)
