"""Tests the value and gradient of every part of the loss against autograd of its definition, and what is counted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from mtptrain.config import LossPart
from mtptrain.training import coupled_depths, losses
from mtptrain.training.loss_blocks import DepthGroup, compare
from mtptrain.training.losses import LossSettings, LossSums, draft_ids_of, draft_losses
from mtptrain.training.teacher import Teacher, teach, teach_by_logits, teach_by_probs
from mtptrain.utils import compile as fusing
from tests.mtptrain.training.plain_losses import PARTS_OF_LOGITS, Draft, plain_losses

M, H, V = 30, 12, 40
OWN_VOCABULARY = torch.arange(1, V, 3)
VOCABULARIES = (None, OWN_VOCABULARY)
LAST_POSITIONS = (7, 8, 25)
"""The draft positions at which spans end. Those after the last span do not count."""


class Case:
    """Random states of a head and a target, at T depths of M draft positions that share their targets."""

    def __init__(self, num_depths: int, ids: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(num_depths)
        self.num_depths, self.ids = num_depths, ids
        self.states = torch.randn(num_depths, M, H, generator=generator).requires_grad_()
        self.target_states = torch.randn(M, H, generator=generator)
        table = torch.randn(V, H, generator=generator) / 2
        self.target_head, self.bias = table.clone(), torch.zeros(V)
        self.own_head = (table if ids is None else torch.randn(len(ids), H, generator=generator)).requires_grad_()
        self.data_tokens = torch.randint(V, (M,), generator=generator)
        left = torch.tensor([next((last - i + 1 for last in LAST_POSITIONS if last >= i), 0) for i in range(M)])
        self.is_draft = left > torch.arange(num_depths)[:, None]
        self.scale = 0.7 ** torch.arange(num_depths) / 10

    def losses(self, settings: LossSettings) -> LossSums:
        group = DepthGroup(
            self.states, self.own_head, self.target_states, self.target_logits, self.is_draft, self.scale, self.ids
        )
        has_data = LossPart.data_ce in settings.mix
        return draft_losses(replace(group, data_tokens=self.data_tokens if has_data else None), settings)

    def target_logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.target_head.T + self.bias

    def plain_losses(self, settings: LossSettings) -> torch.Tensor:
        """Returns the sums of losses [T] by definition, computed in fp64."""
        sums, own_head = [torch.zeros(())] * self.num_depths, self.own_head.double()
        for t in range(M):
            drafts = []
            for depth in range(int(self.is_draft[:, t].sum())):
                target_state = self.target_states[t + depth].double()
                probs = (target_state @ self.target_head.double().T + self.bias).softmax(-1)
                logits = self.states[depth, t].double() @ own_head.T
                drafts.append(Draft(probs, logits, self.ids, int(self.data_tokens[t + depth])))
            for depth, loss in enumerate(plain_losses(drafts, [], settings)):
                sums[depth] = sums[depth] + loss
        return torch.stack(sums).float()

    def gradients(self, loss: torch.Tensor) -> Sequence[torch.Tensor]:
        gradients = torch.autograd.grad(loss, (self.states, self.own_head), allow_unused=True)
        return [torch.zeros(()) if x is None else x for x in gradients]


@pytest.mark.parametrize("form", [teach_by_probs, teach_by_logits])
def test_every_part_is_its_definition_whether_or_not_the_vocabulary_is_the_heads_own(
    form: Callable[..., Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs learn from logits, and CPUs from probabilities.

    `test_exact_step.py` has the parts of states and of heads, and every way in which depths are grouped.
    """
    for module in (losses, coupled_depths):
        monkeypatch.setattr(module, "teach", form)
    for part, ids in product(PARTS_OF_LOGITS, VOCABULARIES):
        case, settings = Case(4, ids), LossSettings({part: 1.0}, chunk_rows=24)
        ours, plain = case.losses(settings), case.plain_losses(settings)
        torch.testing.assert_close(ours.parts[0], plain, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(ours.loss, (plain * case.scale).sum(), atol=1e-4, rtol=1e-5)
        gradients = [case.gradients(loss) for loss in (ours.loss, (plain * case.scale).sum())]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
        assert not gradients[0][0][~case.is_draft].any()
    # A logit that is not finite is seen in the KL. Token 1 is in the head's own vocabulary, and token 0 is not.
    for value, token, ids in product((torch.nan, torch.inf, -torch.inf), (0, 1), VOCABULARIES):
        case = Case(3, ids)
        case.bias[token] = value
        assert case.losses(LossSettings()).kl.isnan().all()


def test_parts_are_finite_where_target_and_head_are_certain_of_different_tokens() -> None:
    for part, ids in product([LossPart.rkl, LossPart.jsd, LossPart.nla, LossPart.lk], VOCABULARIES):
        case = Case(2, ids)
        case.target_head = 500 * case.target_head
        with torch.no_grad():
            case.own_head *= -500
        loss = case.losses(LossSettings({part: 1.0})).loss
        assert loss.isfinite() and all(x.isfinite().all() for x in case.gradients(loss))


def test_gradients_hold_without_drafts_and_where_the_target_is_almost_surely_outside_the_draft_vocabulary() -> None:
    case, settings = Case(3, OWN_VOCABULARY), LossSettings()
    case.bias = torch.full((V,), 14.0).index_fill_(0, OWN_VOCABULARY, 0.0)  # a probability of some 1e-6 is inside
    gradient = case.gradients(case.losses(settings).loss)[0]
    expected = case.gradients((case.plain_losses(settings) * case.scale).sum())[0]
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-5
    case.is_draft = torch.zeros_like(case.is_draft)
    sums = case.losses(settings)
    assert not sums.loss and not sums.kl.any() and not case.gradients(sums.loss)[0].any()


def test_tokens_of_the_data_are_found_in_a_draft_vocabulary_in_any_order() -> None:
    tokens, ids = torch.tensor([3, 9, 200, 7, 255, 4]), torch.tensor([9, 3, 200, 4])
    assert draft_ids_of(tokens, ids).tolist() == [1, 0, 2, -1, -1, 3]
    assert draft_ids_of(tokens, ids.sort().values).tolist() == [0, 2, 3, -1, -1, 1]


@pytest.mark.slow
def test_compiled_code_gives_the_plain_losses_and_that_of_one_depth_does_not_run_for_two() -> None:
    """Regression test: in this order, code that had been compiled for one depth was wrongly used for two depths."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    for num_depths, num_positions in ((1, 50), (2, 50), (1, 13), (2, 20)):
        logits, target_logits = (2 * torch.randn(n, num_positions, V, generator=generator) for n in (num_depths, 1))
        weights, data_tokens = torch.rand(num_depths * num_positions), torch.arange(num_positions) % V
        teacher, parts, found = teach(target_logits[0], None), dict.fromkeys(PARTS_OF_LOGITS, weights), []
        for is_fused in (False, True):
            fusing.set_compilation(is_fused)
            *rows, divergences, gradient = compare(logits.flatten(0, 1), teacher, parts, num_depths, data_tokens)
            found.append([*rows, *divergences.values(), gradient])
        fusing.set_compilation(False)
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-5)
