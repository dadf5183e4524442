"""The parts of the loss that depend on logits: the gradient and the value of each, for one draft.

Write p for the target's distribution, q for the head's, and z for the head's logits. All formulas hold for a vocabulary
of the head's own: p is not renormalised over it, so that p sums to the mass m <= 1, and q is 0 outside it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mtptrain.settings.loss import LossPart

LK_ETA = 3.0
"""How fast the weight of the part `lk` moves from KL to total variation as acceptance rises, as published."""
SMALLEST = torch.finfo(torch.float32).tiny
"""The least value that a probability has inside a logarithm or a denominator."""


class Rows(NamedTuple):
    """Whole rows of the distributions of R drafts."""

    target_probs: torch.Tensor  # f32[R, D]
    log_target_probs: torch.Tensor | None  # f32[R, D] if the teacher holds logits
    draft_probs: torch.Tensor  # f32[R, D]
    shifted: torch.Tensor  # f32[R, D], the head's logits minus their largest
    total: torch.Tensor  # f32[R, 1], the sum of exp(shifted)
    overlap: torch.Tensor  # f32[R], sum min(target_probs, draft_probs)
    mass: torch.Tensor | None  # f32[R], the sum of target_probs; None if it is 1
    target_tokens: torch.Tensor  # i64[R], -1 outside the head's vocabulary
    data_tokens: torch.Tensor | None  # i64[R], -1 outside the head's vocabulary


Gradient = torch.Tensor
"""f32[R, D], the gradient of a part's value with respect to the logits."""
Divergence = torch.Tensor
"""f32[R], the value of a part that follows from neither the KL nor the overlap: a sum over whole rows."""


def _kl(rows: Rows) -> Gradient:
    draft_probs = rows.draft_probs if rows.mass is None else rows.draft_probs * rows.mass[:, None]
    return draft_probs - rows.target_probs


def _tv(rows: Rows) -> Gradient:
    # Where draft_probs < target_probs, the overlap depends on draft_probs.
    short = torch.where(rows.draft_probs < rows.target_probs, rows.draft_probs, 0.0)
    return rows.draft_probs * short.sum(-1, keepdim=True) - short


def _nla(rows: Rows) -> Gradient:
    return _tv(rows) / rows.overlap.clamp(min=SMALLEST)[:, None]


def _lk(rows: Rows) -> Gradient:
    weight = torch.exp(-LK_ETA * rows.overlap)[:, None]
    return weight * _kl(rows) + (1 - weight) * _tv(rows)


def _cross_entropy(rows: Rows, tokens: torch.Tensor) -> Gradient:
    is_token = torch.arange(rows.draft_probs.shape[-1], device=tokens.device) == tokens[:, None]
    return (rows.draft_probs - is_token.float()) * (tokens >= 0)[:, None]


def _ce(rows: Rows) -> Gradient:
    return _cross_entropy(rows, rows.target_tokens)


def _data_ce(rows: Rows) -> Gradient:
    assert rows.data_tokens is not None
    return _cross_entropy(rows, rows.data_tokens)


def _rkl(rows: Rows) -> tuple[Gradient, Divergence]:
    return _by_log_ratio(rows, _log_target_probs(rows))


def _jsd(rows: Rows) -> tuple[Gradient, Divergence]:
    mean = ((rows.target_probs + rows.draft_probs) / 2).clamp(min=SMALLEST).log()
    gradient, reverse = _by_log_ratio(rows, mean)
    forward = (rows.target_probs * (_log_target_probs(rows) - mean)).sum(-1)
    if rows.mass is not None:
        forward = forward + (1 - rows.mass) * math.log(2)  # outside the head's vocabulary, the mean is half of p
    return gradient / 2, (forward + reverse) / 2


def _log_target_probs(rows: Rows) -> torch.Tensor:
    if rows.log_target_probs is not None:
        return rows.log_target_probs
    return rows.target_probs.clamp(min=SMALLEST).log()


def _by_log_ratio(rows: Rows, log_probs: torch.Tensor) -> tuple[Gradient, Divergence]:
    """Returns q (log(q / r) - KL(q || r)) and KL(q || r), for the logarithms of the probabilities r [R, D]."""
    log_ratio = rows.shifted - rows.total.log() - log_probs
    divergence = (rows.draft_probs * log_ratio).sum(-1)
    return rows.draft_probs * (log_ratio - divergence[:, None]), divergence


GRADIENTS: dict[str, Callable[[Rows], Gradient]] = {
    LossPart.kl: _kl,
    LossPart.tv: _tv,
    LossPart.nla: _nla,
    LossPart.lk: _lk,
    LossPart.ce: _ce,
    LossPart.data_ce: _data_ce,
    LossPart.e2e: _tv,
    LossPart.dpace: _ce,
}
"""Gradients of the parts whose value follows from what `Drafted` has. Those of coupled parts get weights by depth."""
DIVERGENCES: dict[str, Callable[[Rows], tuple[Gradient, Divergence]]] = {LossPart.rkl: _rkl, LossPart.jsd: _jsd}
"""Gradients of the parts that also compute their value from whole rows."""


class Drafted(NamedTuple):
    """How R drafts compare with their teacher, and the gradient of their loss."""

    kl: torch.Tensor  # f32[R]
    overlap: torch.Tensor  # f32[R]
    is_right: torch.Tensor  # bool[R], whether the most likely token is the target's (ties count)
    target_ce: torch.Tensor  # f32[R], cross-entropy with the target's most likely token; 0 if it is outside
    data_ce: torch.Tensor | None  # f32[R], cross-entropy with the data's token; 0 if it is outside
    divergences: dict[LossPart, torch.Tensor]  # f32[R] each
    gradient: torch.Tensor | None  # [R, D], of the weighted loss with respect to the logits, in their dtype


def part_values(drafted: Drafted, part: LossPart) -> torch.Tensor:
    """Returns the value of a part that is not coupled and depends on logits f32[R]."""
    if part in drafted.divergences:
        return drafted.divergences[part]
    if part is LossPart.data_ce:
        assert drafted.data_ce is not None
        return drafted.data_ce
    if part is LossPart.lk:
        weight = torch.exp(-LK_ETA * drafted.overlap)
        return weight * drafted.kl + (1 - weight) * (1 - drafted.overlap)
    return {
        LossPart.kl: lambda: drafted.kl,
        LossPart.tv: lambda: 1 - drafted.overlap,
        LossPart.nla: lambda: -drafted.overlap.clamp(min=SMALLEST).log(),
        LossPart.ce: lambda: drafted.target_ce,
    }[part]()
