"""Tests the drafts of heads whose tokens depend on the draft before, `dspark` and `dflash2`, against their formulas."""

import itertools

import pytest
import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads import HEADS
from mtptrain.heads.base import FirstStates, Head
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import TargetStates, Verified
from mtptrain.utils.errors import UserError
from tests.conftest import make_config
from tests.mtptrain.heads.test_contract import (
    DEPTHS,
    HIDDEN_SIZE,
    PARTS,
    VOCAB_SIZE,
    packed_inputs,
    random_head,
    run,
    tiny_config,
)
from tests.mtptrain.training.plain_dflash import plain_confidence, plain_logits, plain_selected


def drafting_head(
    case: str, monkeypatch: pytest.MonkeyPatch, num_sequences: int
) -> tuple[Head, torch.Tensor, Verified]:
    """Returns a random head, the states [B, T, H] that it drafts from, and two tokens before each draft."""
    head, generator = random_head(case), torch.Generator().manual_seed(0)
    if head.d2t is not None:
        head.d2t.copy_(torch.arange(len(head.d2t)) // 2)
    states = torch.randn(num_sequences, DEPTHS, HIDDEN_SIZE, generator=generator)
    monkeypatch.setattr(head, "draft_first", lambda *_: FirstStates(states, states[:, -1]))
    newest = torch.randint(0, VOCAB_SIZE, (num_sequences, 2), generator=generator)
    read, count = TargetStates(torch.zeros(num_sequences, 1, 1), None), torch.full((num_sequences,), 2)
    return head, states, Verified(newest, count, torch.zeros(num_sequences, 1, dtype=torch.long), read)


@pytest.mark.parametrize("case", ["dspark", "dspark, fill-in, draft vocabulary", "dflash2"])
@torch.no_grad()
def test_each_draft_is_chosen_after_the_one_before_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, states, verified = drafting_head(case, monkeypatch, 8)
    num_changed = 0
    for temperature, sequence in itertools.product((0.0, 1.0), range(8)):
        draft = HeadDrafter(head, PARTS, DEPTHS, sample_drafts=True).draft(verified, Sampler(temperature, seed=0))
        previous = int(verified.tokens[sequence, 1])
        for depth, state in enumerate(states[sequence]):
            logits = plain_logits(head, state, previous, PARTS)
            selected = plain_selected(head, state, previous, PARTS)
            if selected is not None:  # U(c) + <A[p] * P h, B[c]> of the tokens with the largest U
                logits = torch.full((VOCAB_SIZE,), -torch.inf).index_copy(0, *selected)
            else:
                assert draft.logits is not None
                torch.testing.assert_close(draft.logits[depth][sequence], logits, atol=1e-5, rtol=1e-5)
            previous = int(draft.tokens[sequence, depth])
            if temperature:
                probs = head.over_target_vocab(logits.softmax(-1), VOCAB_SIZE)
                assert draft.probs is not None
                torch.testing.assert_close(draft.probs[sequence, depth], probs, atol=1e-6, rtol=1e-4)
            else:
                assert previous == int(head.target_tokens(logits.argmax()))
            num_changed += int(logits.argmax()) != int((head.output_weight(PARTS) @ state).argmax())
    assert num_changed > 4, "the token before must change what is drafted"


@torch.no_grad()
def test_a_draft_ends_before_the_first_token_below_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    head, states, verified = drafting_head("dspark", monkeypatch, 40)
    draft = HeadDrafter(head, PARTS, DEPTHS, confidence_threshold=0.5).draft(verified, Sampler())
    for sequence in range(40):
        previous = [int(verified.tokens[sequence, 1]), *draft.tokens[sequence].tolist()]
        logits = [plain_confidence(head, states[sequence, depth], previous[depth]) for depth in range(DEPTHS)]
        expected = [all(logit is not None and logit >= 0 for logit in logits[: n + 1]) for n in range(DEPTHS)]
        assert draft.is_proposed[sequence].tolist() == expected
    assert 0.05 < draft.is_proposed.float().mean() < 0.95
    whole = HeadDrafter(head, PARTS, DEPTHS).draft(verified, Sampler())
    assert whole.is_proposed.all() and torch.equal(whole.tokens, draft.tokens)


@torch.no_grad()
def test_dflash2_drafts_as_dflash_at_the_start_and_adds_scores_in_fp32_as_engines_do() -> None:
    torch.manual_seed(0)
    sizes: dict[str, object] = {"ttt_steps": DEPTHS, "capture_layers": [0, 1], "num_layers": 2}
    dflash = build_head(HEADS["dflash"].Config(**sizes), tiny_config())
    start = build_head(HEADS["dflash2"].Config(**sizes, selector_top_k=4), tiny_config())
    start.load_state_dict(dflash.state_dict(), strict=False)
    tokens = packed_inputs(start)
    states = run(start, tokens)
    torch.testing.assert_close(states, run(dflash, tokens), atol=1e-6, rtol=1e-6)
    correction = start.correction(tokens, states)
    assert correction is not None and correction.features.any() and not correction.weight.any()

    head = random_head("dflash2").bfloat16()
    assert isinstance(head, Dflash2Head)
    logits, states = torch.randn(64, VOCAB_SIZE).bfloat16() * 20, torch.randn(64, HIDDEN_SIZE).bfloat16()
    previous = torch.arange(64) % VOCAB_SIZE
    largest, candidates = logits.topk(head.num_candidates, -1)
    features = head.candidate_selector(states, previous)
    changes = (head.candidate_selector.successor_codebook[candidates] @ features[..., None])[..., 0]
    scores = head.corrected(logits, states, previous)
    assert torch.equal(scores.gather(1, candidates), largest.float() + changes.float())


REFUSED = {
    "head=dspark": "must name the part confidence with head dspark, whose confidence otherwise stays untr",
    "head=mtp train.loss={kl:1,confidence:1}": "must not name the part confidence with head mtp, which has",
    "head=dflash2 train.loss={selector:1,kl:0}": "must name another part than selector, which does not teach the head",
    "head=dflash acceptance.confidence_thresholds=[0.5]": "must be left out with head dflash, which has",
    "head=dspark train.loss={kl:1,confidence:1} acceptance.confidence_thresholds=[1.0]": "must be different numbers ab",
}


UNFIT: list[tuple[dict[str, object], str]] = [
    ({"conv_group_size": 48}, "conv_group_size: must divide the target's hidden size 128, .* set head.conv_group_size"),
    ({"selector_top_k": 60}, "selector_top_k: must be at most the 50 tokens of the target's vocabulary"),
    ({"selector_top_k": 5, "draft_vocab_size": 20}, "draft_vocab_size: must be null with head dflash2"),
    ({"selector_top_k": 5, "sample_from_anchor": True}, "sample_from_anchor: must be false with head dflash2"),
]


def test_settings_and_mixes_that_do_not_fit_a_head_are_refused() -> None:
    for overrides, message in REFUSED.items():
        with pytest.raises(UserError, match=message):
            make_config("head.ttt_steps=3", "acceptance.num_speculative_tokens=3", *overrides.split())
    for settings, message in UNFIT:
        with pytest.raises(UserError, match=f"^head.{message}"):
            build_head(Dflash2Head.Config(**settings), tiny_config())  # type: ignore[arg-type]
