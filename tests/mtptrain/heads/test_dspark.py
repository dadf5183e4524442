"""Tests the drafts of a DSpark head against its formula, and that training corrects logits as decoding does."""

import pytest
import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads.base import FirstStates
from mtptrain.heads.dspark import DsparkHead
from mtptrain.target.model import TargetStates, Verified
from mtptrain.utils.errors import UserError
from tests.conftest import make_config
from tests.mtptrain.heads.test_contract import CASES, DEPTHS, PARTS, random_head
from tests.mtptrain.training.plain_dflash import plain_logits

DSPARK = [case for case, (name, _) in CASES.items() if name == "dspark"]


def dspark(case: str) -> DsparkHead:
    head = random_head(case)
    assert isinstance(head, DsparkHead)
    if head.d2t is not None:
        head.d2t.copy_(torch.arange(len(head.d2t)) // 2)
    return head


def verified_behind(newest: torch.Tensor) -> Verified:
    """Returns sequences of two tokens [B, 2], of which the target has read the first."""
    read = TargetStates(torch.zeros(len(newest), 1, 1), None)
    return Verified(newest, torch.full((len(newest),), 2), torch.zeros(len(newest), 1, dtype=torch.long), read)


@pytest.mark.parametrize("case", DSPARK)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_each_draft_is_chosen_after_the_one_before_it(
    case: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = dspark(case)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, DEPTHS, PARTS.lm_head.shape[1], generator=generator) * 3
    monkeypatch.setattr(head, "draft_first", lambda *_: FirstStates(states, states[:, -1]))
    newest = torch.tensor([[7, 3], [4, 9]])
    drafter = HeadDrafter(head, PARTS, DEPTHS, sample_drafts=True)
    draft = drafter.draft(verified_behind(newest), Sampler(temperature, seed=0))
    for sequence in range(2):
        previous = int(newest[sequence, 1])
        for depth in range(DEPTHS):
            logits = plain_logits(head, states[sequence, depth], previous, PARTS)
            assert draft.logits is not None
            torch.testing.assert_close(draft.logits[depth][sequence], logits, atol=1e-5, rtol=1e-5)
            chosen = int(draft.tokens[sequence, depth])
            if temperature:
                assert draft.probs is not None
                probs = head.over_target_vocab(logits.softmax(-1), len(PARTS.embed_tokens))
                torch.testing.assert_close(draft.probs[sequence, depth], probs, atol=1e-5, rtol=1e-4)
            else:
                assert chosen == int(head.target_tokens(logits.argmax()))
            previous = chosen


@torch.no_grad()
def test_a_draft_ends_before_the_first_token_below_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    head, generator = dspark("dspark"), torch.Generator().manual_seed(0)
    states = torch.randn(40, DEPTHS, PARTS.lm_head.shape[1], generator=generator)
    monkeypatch.setattr(head, "draft_first", lambda *_: FirstStates(states, states[:, -1]))
    newest = torch.randint(0, len(PARTS.lm_head), (40, 2), generator=generator)
    verified = verified_behind(newest)
    draft = HeadDrafter(head, PARTS, DEPTHS, confidence_threshold=0.5).draft(verified, Sampler())
    proj, w1 = head.confidence_head.proj, head.markov_head.markov_w1.weight
    for sequence in range(40):
        previous, sure = int(newest[sequence, 1]), []
        for depth in range(DEPTHS):
            logit = proj.weight[0] @ torch.cat([states[sequence, depth], w1[previous]]) + proj.bias[0]
            sure.append(bool(logit >= 0))
            previous = int(draft.tokens[sequence, depth])
        assert draft.is_proposed[sequence].tolist() == [all(sure[: depth + 1]) for depth in range(DEPTHS)]
    assert 0.05 < draft.is_proposed.float().mean() < 0.95
    whole = HeadDrafter(head, PARTS, DEPTHS).draft(verified, Sampler())
    assert whole.is_proposed.all() and torch.equal(whole.tokens, draft.tokens)


TRAINED = ("head=dspark", "train.loss={kl:1,confidence:1}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("head=dspark",), "must name the part confidence with head dspark, whose confidence otherwise stays untr"),
        (("head=dflash", "acceptance.confidence_thresholds=[0.5]"), "must be left out with head dflash, which has"),
        ((*TRAINED, "acceptance.confidence_thresholds=[0.5,0.5]"), "must be different numbers above 0 and below"),
        ((*TRAINED, "acceptance.confidence_thresholds=[0.5,0.50000001]"), "must be different numbers above 0 and belo"),
        ((*TRAINED, "acceptance.confidence_thresholds=[1.0]"), "must be different numbers above 0 and below"),
        (("head=mtp", "train.loss={kl:1,confidence:1}"), "must not name the part confidence with head mtp, which has"),
    ],
)
def test_a_confidence_that_a_head_does_not_have_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config(*overrides, "head.ttt_steps=3", "acceptance.num_speculative_tokens=3")
