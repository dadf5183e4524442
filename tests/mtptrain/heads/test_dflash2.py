"""Tests the drafts of a DFlash 2 head against its formula, its start, and the settings that it refuses."""

import pytest
import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads import HEADS
from mtptrain.heads.base import FirstStates
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.files import build_head
from mtptrain.utils.errors import UserError
from tests.conftest import make_config
from tests.mtptrain.heads.test_contract import DEPTHS, PARTS, packed_inputs, random_head, run, tiny_config
from tests.mtptrain.heads.test_dspark import verified_behind
from tests.mtptrain.training.plain_dflash import plain_selected


def dflash2(case: str = "dflash2") -> Dflash2Head:
    head = random_head(case)
    assert isinstance(head, Dflash2Head)
    return head


def plain_scores(head: Dflash2Head, state: torch.Tensor, previous: int) -> torch.Tensor:
    """U(c) + <A[p] * P h, B[c]> of the tokens with the largest U, and -inf for all others."""
    found = plain_selected(head, state, previous, PARTS)
    assert found is not None
    return torch.full((len(PARTS.lm_head),), -torch.inf).index_copy(0, *found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_each_draft_is_chosen_among_candidates_after_the_one_before(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, generator = dflash2(), torch.Generator().manual_seed(0)
    states = torch.randn(8, DEPTHS, PARTS.lm_head.shape[1], generator=generator)
    monkeypatch.setattr(head, "draft_first", lambda *_: FirstStates(states, states[:, -1]))
    newest = torch.randint(0, len(PARTS.lm_head), (8, 2), generator=generator)
    drafter = HeadDrafter(head, PARTS, DEPTHS, sample_drafts=True)
    draft = drafter.draft(verified_behind(newest), Sampler(temperature, seed=0))
    changed = 0
    for sequence in range(8):
        previous = int(newest[sequence, 1])
        for depth in range(DEPTHS):
            scores = plain_scores(head, states[sequence, depth], previous)
            previous = int(draft.tokens[sequence, depth])
            if temperature:
                assert draft.probs is not None
                probs = draft.probs[sequence, depth]
                torch.testing.assert_close(probs, scores.softmax(-1), atol=1e-6, rtol=1e-4)
                assert (probs > 0).sum() == head.num_candidates
            else:
                assert previous == int(scores.argmax())
            changed += int(scores.argmax()) != int((PARTS.lm_head @ states[sequence, depth]).argmax())
    assert changed > 2, "the selector must choose other tokens than the logits"


@torch.no_grad()
def test_scores_are_added_in_fp32_as_in_engines() -> None:
    head = dflash2().bfloat16()
    logits, states = torch.randn(64, 50).bfloat16() * 20, torch.randn(64, 128).bfloat16()
    previous = torch.arange(64) % 50
    largest, candidates = logits.topk(head.num_candidates, -1)
    features = head.candidate_selector(states, previous)
    changes = (head.candidate_selector.successor_codebook[candidates] @ features[..., None])[..., 0]
    scores = head.corrected(logits, states, previous)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.gather(1, candidates), largest.float() + changes.float())


@torch.no_grad()
def test_at_the_start_it_drafts_as_dflash_does() -> None:
    torch.manual_seed(0)
    sizes: dict[str, object] = {"ttt_steps": DEPTHS, "capture_layers": [0, 1], "num_layers": 2}
    dflash = build_head(HEADS["dflash"].Config(**sizes), tiny_config())
    head = build_head(Dflash2Head.Config(**sizes, selector_top_k=4), tiny_config())  # type: ignore[arg-type]
    assert isinstance(head, Dflash2Head)
    head.load_state_dict(dflash.state_dict(), strict=False)
    tokens = packed_inputs(head)
    states = run(head, tokens)
    torch.testing.assert_close(states, run(dflash, tokens), atol=1e-6, rtol=1e-6)
    correction = head.correction(tokens, states)
    assert correction.features.any() and not correction.weight.any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "must name the part selector with head dflash2, whose selector otherwise stays untrained"),
        (("train.loss={kl:1,selector:1,confidence:1}",), "must not name the part confidence with head dflash2, which"),
        (("head=dflash", "train.loss={kl:1,selector:1}"), "must not name the part selector with head dflash, which"),
        (("train.loss={selector:1,kl:0}",), "must name another part than selector, which does not teach the head"),
        (("head.conv_kernel_size=0",), "head.conv_kernel_size: must be a number from 1 to 16, but is 0"),
    ],
)
def test_a_mix_or_a_setting_that_does_not_fit_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_config("head=dflash2", *overrides, "head.ttt_steps=3", "acceptance.num_speculative_tokens=3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"conv_group_size": 48},
            "head.conv_group_size: must divide the target's hidden size 128, but is 48; set head.conv_group_size=16",
        ),
        ({"selector_top_k": 60}, "head.selector_top_k: must be at most the 50 tokens of the target's vocabulary"),
        ({"selector_top_k": 5, "draft_vocab_size": 20}, "head.draft_vocab_size: must be null with head dflash2"),
        ({"selector_top_k": 5, "sample_from_anchor": True}, "head.sample_from_anchor: must be false with head dflash2"),
    ],
)
def test_a_head_that_cannot_be_built_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_head(Dflash2Head.Config(**settings), tiny_config())  # type: ignore[arg-type]
