"""Tests the value and gradient of every part of the loss against autograd of its definition."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from mtptrain.config import LossPart
from mtptrain.training.coupled_depths import Agreement, agreement, coupled_parts
from mtptrain.training.losses import LossSettings, LossSums, draft_losses
from tests.mtptrain.training.plain_losses import PARTS_OF_LOGITS, Draft, plain_losses

M, H, V = 30, 12, 40
OWN_VOCABULARY = torch.arange(1, V, 3)
LAST_POSITIONS = (7, 8, 25)
"""The draft positions at which spans end. Those after the last span do not count."""


class Case:
    """Random states of a head and a target, at T depths of M draft positions.

    If the depths share targets, depth k of draft position t has the target token t + k. Otherwise, every depth has
    target states of its own.
    """

    def __init__(self, num_depths: int, ids: torch.Tensor | None, share_targets: bool) -> None:
        generator = torch.Generator().manual_seed(num_depths)
        self.num_depths, self.ids, self.share_targets = num_depths, ids, share_targets
        self.states = torch.randn(num_depths, M, H, generator=generator).requires_grad_()
        self.target_states = torch.randn(1 if share_targets else num_depths, M, H, generator=generator)
        table = torch.randn(V, H, generator=generator) / 2
        self.target_head = table.clone()
        self.own_head = (table if ids is None else torch.randn(len(ids), H, generator=generator)).requires_grad_()
        self.data_tokens = torch.randint(V, self.target_states.shape[:2], generator=generator)
        left = torch.tensor([next((last - i + 1 for last in LAST_POSITIONS if last >= i), 0) for i in range(M)])
        self.is_draft = left > torch.arange(num_depths)[:, None]
        self.scale = 0.7 ** torch.arange(num_depths) / 10

    def losses(self, settings: LossSettings) -> LossSums:
        """Computes the loss as the trainer does, in one group of depths or in one for each depth."""
        groups = [self.states] if self.share_targets else self.states.split(1)
        coupled = None
        if settings.couples_depths and len(groups) > 1:
            found = [
                agreement(group, self.own_head, targets, self.target_logits, settings.chunk_rows, self.ids)
                for group, targets in zip(groups, self.target_states, strict=True)
            ]
            coupled = coupled_parts(Agreement.joined(found), self.is_draft, self.scale)
        sums = []
        for i, (group, targets) in enumerate(zip(groups, self.target_states, strict=True)):
            depths = slice(i, i + len(group))
            sums.append(
                draft_losses(
                    group,
                    self.own_head,
                    targets,
                    self.target_logits,
                    self.is_draft[depths],
                    self.scale[depths],
                    settings,
                    self.ids,
                    self.data_tokens[i] if LossPart.data_ce in settings.mix else None,
                    None if coupled is None else {part: each.at(depths) for part, each in coupled.items()},
                )
            )
        return LossSums.joined(sums)

    def target_logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.target_head.T

    def plain_losses(self, settings: LossSettings) -> torch.Tensor:
        """Returns the sums of losses [T] by definition, computed in fp64."""
        sums, own_head = [torch.zeros(())] * self.num_depths, self.own_head.double()
        for t in range(M):
            drafts, features = [], []
            for depth in range(int(self.is_draft[:, t].sum())):
                target = (0, t + depth) if self.share_targets else (depth, t)
                state = self.states[depth, t].double()
                probs = self.target_logits(self.target_states[target]).double().softmax(-1)
                drafts.append(Draft(probs, state @ own_head.T, self.ids, int(self.data_tokens[target])))
                features.append(F.smooth_l1_loss(state, self.target_states[target].double()))
            for depth, loss in enumerate(plain_losses(drafts, features, settings)):
                sums[depth] = sums[depth] + loss
        return torch.stack(sums).float()

    def gradients(self, loss: torch.Tensor) -> Sequence[torch.Tensor]:
        found = torch.autograd.grad(loss, (self.states, self.own_head), allow_unused=True)
        return [torch.zeros(()) if x is None else x for x in found]


OF_STATES = [*PARTS_OF_LOGITS, LossPart.features]
"""All parts but the confidence, which only a head has that gives one."""


@pytest.mark.parametrize("share_targets", [True, False])
@pytest.mark.parametrize("ids", [None, OWN_VOCABULARY], ids=["target's vocabulary", "own vocabulary"])
@pytest.mark.parametrize("num_depths", [1, 4])
@pytest.mark.parametrize("part", OF_STATES)
def test_every_part_is_its_definition(
    part: LossPart, num_depths: int, ids: torch.Tensor | None, share_targets: bool
) -> None:
    case, settings = Case(num_depths, ids, share_targets), LossSettings({part: 1.0}, 3.0, chunk_rows=24)
    ours, plain = case.losses(settings), case.plain_losses(settings)
    torch.testing.assert_close(ours.losses, plain, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours.parts[0], plain, atol=1e-4, rtol=1e-5)
    if part is LossPart.kl:
        torch.testing.assert_close(ours.kl, plain, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours.loss, (plain * case.scale).sum(), atol=1e-4, rtol=1e-5)
    wanted = case.gradients((plain * case.scale).sum())
    found = case.gradients(ours.loss)
    for our_grad, grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(our_grad, grad.expand_as(our_grad), atol=1e-6, rtol=1e-4)
    assert not found[0][~case.is_draft].any()


@pytest.mark.parametrize("part", [LossPart.rkl, LossPart.jsd, LossPart.nla, LossPart.lk])
@pytest.mark.parametrize("ids", [None, OWN_VOCABULARY])
def test_parts_are_finite_where_target_and_head_are_certain_of_different_tokens(
    part: LossPart, ids: torch.Tensor | None
) -> None:
    case = Case(2, ids, share_targets=True)
    case.target_head = 500 * case.target_head
    with torch.no_grad():
        case.own_head *= -500
    loss = case.losses(LossSettings({part: 1.0})).loss
    assert loss.isfinite() and all(x.isfinite().all() for x in case.gradients(loss))
