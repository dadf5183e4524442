"""The parts of the training loss, and the check of the mix that `train.loss` gives."""

import math
from difflib import get_close_matches
from enum import StrEnum

from mtptrain.utils.errors import UserError


class LossPart(StrEnum):
    """A part of the loss. p is the target's distribution, q the head's, and a = sum min(p, q) their overlap.

    If the head has a vocabulary of its own, p is not renormalised over it, and q is 0 outside it.
    """

    kl = "kl"
    """Forward KL, KL(p || q). The target's mass outside the head's vocabulary is added, instead of an infinite term."""
    rkl = "rkl"
    """Reverse KL, KL(q || p)."""
    jsd = "jsd"
    """Jensen-Shannon divergence, KL(p || m) / 2 + KL(q || m) / 2, where m = (p + q) / 2."""
    tv = "tv"
    """Total variation distance, 1 - a: the probability that a sampled draft is rejected."""
    nla = "nla"
    """Negative log acceptance, -log a (arXiv 2602.23881). Its gradient is the one of `tv` divided by a."""
    lk = "lk"
    """w KL + (1 - w) TV, where w = exp(-3 a) has no gradient (arXiv 2602.23881)."""
    ce = "ce"
    """Cross-entropy with the target's most likely token; tokens outside the head's vocabulary are skipped."""
    data_ce = "data_ce"
    """Cross-entropy with the next token of the data, as in plain fine-tuning; tokens outside the head's vocabulary are
    skipped."""
    features = "features"
    """Smooth L1 distance between the head's states and the target's post-norm states, averaged over H (EAGLE-1, arXiv
    2401.15077)."""
    e2e = "e2e"
    """1 - (1 / T) sum_j a_0 ... a_j over the depths j of a draft position: one minus the expected share of drafts that
    are accepted (arXiv 2607.25852). The weight of depth j replaces 1 / T."""
    dpace = "dpace"
    """`ce`, with depth j of a draft position weighted by sum_{m >= j} f_0 ... f_m, which has no gradient. Here
    f_i = q_i(x) / 2 + 1 / 2, where x is the target's most likely token at depth i (D-PACE, arXiv 2605.18810)."""
    selector = "selector"
    """KL(p || q) among the candidates that head `dflash2` chooses from, times their mass m: the sum over them of
    p log(p / (m q)), where q is the softmax of their scores after the data's token before."""
    confidence = "confidence"
    """Binary cross-entropy between the confidence of head `dspark` and the overlap a, which has no gradient (arXiv
    2607.05147)."""


COUPLED_PARTS = (LossPart.e2e, LossPart.dpace)
"""Parts whose value at one depth depends on the other depths of the same draft position."""
OWN_PARTS = (LossPart.confidence, LossPart.selector)
"""Parts that only some heads have; see `HeadConfig.own_loss_part`."""


def loss_mix(loss: object, feature_weight: float = 0.0) -> dict[LossPart, float]:
    """Returns the weight of each part of `train.loss` and `train.feature_weight`, without those that are 0."""
    given = {loss: 1.0} if isinstance(loss, str) else loss
    weights = list(given.values()) if isinstance(given, dict) else []
    are_weights = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < math.inf for x in weights)
    if not isinstance(given, dict) or not are_weights or not any(weights):
        raise UserError(
            "train.loss: must be the name of a part, or give parts finite weights of at least 0, one of them above 0, "
            f"as in {{ce:0.1,tv:0.9}}, but is {loss!r}; correct it"
        )
    names = [part.value for part in LossPart]
    for name in given:
        if name not in names:
            near = get_close_matches(str(name), names, n=1)
            raise UserError(
                f"train.loss: must be made of the parts {', '.join(names)}, but names {name!r}; "
                f"{f'did you mean {near[0]}?' if near else 'choose among these'}"
            )
    if feature_weight and LossPart.features in given:
        raise UserError(
            f"train.feature_weight: must be 0 if train.loss names the part features, but is {feature_weight:g}; give "
            "the weight in one of the two"
        )
    mix = {LossPart(name): float(weight) for name, weight in given.items() if weight}
    if feature_weight:
        mix[LossPart.features] = feature_weight
    if LossPart.confidence in mix:  # the last one, because it needs the overlaps that come with the others
        mix[LossPart.confidence] = mix.pop(LossPart.confidence)
    return mix
