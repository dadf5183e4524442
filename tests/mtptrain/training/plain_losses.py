"""The loss of one draft position by its definition: whole distributions over the target's vocabulary, and autograd."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mtptrain.config import LossPart
from mtptrain.settings.loss import OWN_PARTS
from mtptrain.training.losses import LossSettings

PARTS_OF_LOGITS = [part for part in LossPart if part not in (LossPart.features, *OWN_PARTS)]


class Draft:
    """One draft: the target's distribution p [V], and the head's q [V], which is 0 outside the head's vocabulary."""

    def __init__(
        self,
        probs: torch.Tensor,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        data_token: int,
        confidence: torch.Tensor | None = None,
        selected: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.confidence = confidence  # its logit
        self.selected = selected  # ids and scores of the candidates
        self.ids = torch.arange(len(probs)) if ids is None else ids
        self.data_token, self.logprobs, self.p = data_token, logits.log_softmax(-1), probs
        self.q = torch.zeros_like(probs).index_copy(0, self.ids, self.logprobs.exp())
        self.overlap = 1 - (self.p - self.q).abs().sum() / 2

    def kl(self) -> torch.Tensor:
        inside = self.p[self.ids]
        return (inside * (inside.log() - self.logprobs)).sum() + (1 - inside.sum())

    def cross_entropy(self, token: int) -> torch.Tensor:
        found = (self.ids == token).nonzero()
        return -self.logprobs[found[0, 0]] if len(found) else 0 * self.logprobs.sum()

    def value(self, part: LossPart, eta: float) -> torch.Tensor:
        match part:
            case LossPart.kl:
                return self.kl()
            case LossPart.rkl:
                return (self.logprobs.exp() * (self.logprobs - self.p[self.ids].log())).sum()
            case LossPart.jsd:
                log_mean = ((self.p + self.q) / 2).log()
                reverse = (self.logprobs.exp() * (self.logprobs - log_mean[self.ids])).sum()
                return (F.kl_div(log_mean, self.p, reduction="sum") + reverse) / 2
            case LossPart.tv:
                return 1 - self.overlap
            case LossPart.nla:
                return -self.overlap.log()
            case LossPart.lk:
                weight = math.exp(-eta * float(self.overlap.detach()))
                return weight * self.kl() + (1 - weight) * (1 - self.overlap)
            case LossPart.ce:
                return self.cross_entropy(int(self.p.argmax()))
            case LossPart.data_ce:
                return self.cross_entropy(self.data_token)
            case LossPart.confidence:
                assert self.confidence is not None
                sure, overlap = self.confidence.sigmoid(), self.overlap.detach()
                return -(overlap * sure.log() + (1 - overlap) * (1 - sure).log())
            case LossPart.selector:
                assert self.selected is not None
                candidates, scores = self.selected
                p = self.p[candidates]
                return p.sum() * F.kl_div(scores.log_softmax(-1), p / p.sum(), reduction="sum")
        raise AssertionError(part)


def dpace_weights(drafts: Sequence[Draft]) -> list[float]:
    factors = [float(draft.q[draft.p.argmax()].detach()) / 2 + 0.5 for draft in drafts]
    return [sum(math.prod(factors[: last + 1]) for last in range(j, len(drafts))) for j in range(len(drafts))]


def plain_losses(
    drafts: Sequence[Draft], features: Sequence[torch.Tensor], settings: LossSettings
) -> list[torch.Tensor]:
    """Returns the loss at each depth of one draft position, given its drafts that count.

    Args:
        drafts: the drafts, by depth.
        features: the value of the part `features` of each.
        settings: the mix of parts, and eta.
    """
    weights, losses = dpace_weights(drafts), []
    for depth, draft in enumerate(drafts):
        loss = torch.zeros(())
        for part, weight in settings.mix.items():
            if part is LossPart.features:
                value = features[depth]
            elif part is LossPart.e2e:
                value = 1 - torch.stack([each.overlap for each in drafts[: depth + 1]]).prod()
            elif part is LossPart.dpace:
                value = weights[depth] * draft.value(LossPart.ce, 0.0)
            else:
                value = draft.value(part, 3.0)
            loss = loss + weight * value
        losses.append(loss)
    return losses
