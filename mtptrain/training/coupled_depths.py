"""The parts of the loss that couple the depths of a draft position.

Depth k at draft position t and depth 0 at t + k share a target token, so a block of logits holds them together. The
depths of one draft position are therefore spread over several blocks, but the gradient of a coupled part needs all of
them. So a first pass without gradients computes the `Agreement` of every draft; from it follow the values of the
coupled parts, and the weights with which the second pass adds the gradients of single drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtptrain.settings.loss import LossPart
from mtptrain.training.loss_blocks import DepthGroup, blocks, compare, corrected_logits
from mtptrain.training.teacher import teach


class Agreement(NamedTuple):
    """How each draft agrees with the target."""

    overlap: torch.Tensor  # f32[T, M], the probability that a sampled draft is accepted, without a selector's scores
    target_ce: torch.Tensor  # f32[T, M], -log q(x) of the target's most likely token x; 0 if it is outside
    is_inside: torch.Tensor  # bool[T, M], whether the target's most likely token is in the head's vocabulary

    @classmethod
    def joined(cls, groups: "Sequence[Agreement]") -> "Agreement":
        """Returns the agreement at all depths from those of consecutive groups of depths."""
        return cls(*(torch.cat(each) for each in zip(*groups, strict=True)))


@torch.no_grad()
def agreement(group: DepthGroup, chunk_rows: int) -> Agreement:
    """Returns the agreement of every draft of a group that has a teacher."""
    num_depths, num_drafts, _ = group.states.shape
    overlap, target_ce, is_inside = group.states.new_zeros(3, num_depths, num_drafts, dtype=torch.float32)
    whole = Agreement(overlap, target_ce, is_inside.bool())
    for block in blocks(num_depths, num_drafts, chunk_rows):
        teacher = teach(group.target_logits(group.target_states[block.targets]), group.draft_token_ids)
        logits = corrected_logits(block.rows(group.states), group.lm_head, group.correction_at(block))
        drafted = compare(logits, teacher, {}, num_depths)
        is_inside = (teacher.tokens >= 0).repeat(num_depths)
        for values, x in zip((drafted.overlap, drafted.target_ce, is_inside), whole, strict=True):
            block.write(values.unflatten(0, (num_depths, -1)), x)
    return whole


class CoupledPart(NamedTuple):
    """A coupled part of the loss at every depth of every draft position."""

    values: torch.Tensor
    """f32[T, M], the part's value at each depth."""
    weights: torch.Tensor
    """f32[T, M], the weight in the loss of each draft's own gradient; 0 where a draft does not count."""

    def at(self, depths: slice) -> "CoupledPart":
        return CoupledPart(self.values[depths], self.weights[depths])


def coupled_parts(drafts: Agreement, is_draft: torch.Tensor, scale: torch.Tensor) -> dict[LossPart, CoupledPart]:
    """Returns the coupled parts, given whether each draft counts bool[T, M] and the weight of each depth [T]."""
    weights = is_draft * scale[:, None]
    return {LossPart.e2e: _e2e(drafts, weights), LossPart.dpace: _dpace(drafts, is_draft, weights)}


def _e2e(drafts: Agreement, weights: torch.Tensor) -> CoupledPart:
    """The value at depth j is 1 - a_0 ... a_j.

    The gradient of the loss sum_j w_j (1 - a_0 ... a_j) is the sum over i of c_i times the gradient of 1 - a_i, where
    c_i = sum_{j >= i} w_j (a_0 ... a_j) / a_i = (a_0 ... a_{i-1}) s_i and s_i = w_i + a_{i+1} s_{i+1}.
    """
    accepted = drafts.overlap.cumprod(0)
    sums = list(weights)
    for depth in reversed(range(len(sums) - 1)):
        sums[depth] = sums[depth] + drafts.overlap[depth + 1] * sums[depth + 1]
    before = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]])
    return CoupledPart(1 - accepted, before * torch.stack(sums))


def _dpace(drafts: Agreement, is_draft: torch.Tensor, weights: torch.Tensor) -> CoupledPart:
    """The value at depth j is the cross-entropy times the sum of f_0 ... f_m over the depths m >= j that count.

    Here f_i = q_i(x) / 2 + 1 / 2, where q_i(x) is the head's probability, at depth i, of the target's most likely token
    x; 0 if x is outside the vocabulary.
    """
    factors = (torch.exp(-drafts.target_ce) * drafts.is_inside + 1) / 2
    products = factors.cumprod(0) * is_draft
    following = products.flip(0).cumsum(0).flip(0)
    return CoupledPart(following * drafts.target_ce, following * weights)
