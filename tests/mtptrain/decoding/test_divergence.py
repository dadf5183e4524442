"""Tests the search for the first token in which an engine and mtptrain differ, and the gap between their logits."""

import pytest
import torch

from mtptrain.decoding.divergence import Divergence, first_answer_divergence, first_draft_divergence
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.heads.base import Head
from mtptrain.target.model import Target
from tests.mtptrain.decoding.drafting import decode, penalised, random_head

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
DRAFTS = 3


@pytest.fixture(scope="module")
def head(target: Target) -> Head:
    return random_head(target).requires_grad_(False)


@pytest.fixture(scope="module")
def ours(target: Target, head: Head) -> list[Generation]:
    return decode(target, HeadDrafter(head, target.parts, DRAFTS), PROMPTS)


def test_the_first_answer_that_differs_is_found_with_the_gap_of_the_targets_logits(
    target: Target, ours: list[Generation]
) -> None:
    tokens = [generation.tokens for generation in ours]
    assert first_answer_divergence(target, PROMPTS, tokens, tokens) is None
    other = (tokens[1][5] + 1) % 256
    theirs = [tokens[0], [*tokens[1][:5], other, *tokens[1][6:]], [0] * 24]
    found = first_answer_divergence(target, PROMPTS, tokens, theirs)
    assert found is not None
    assert (found.what, found.prompt, found.position, found.ours, found.theirs) == ("answer", 1, 5, tokens[1][5], other)

    read = torch.tensor([PROMPTS[1] + tokens[1][:5]])
    settings = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {other: 0.25}}
    with_penalties = first_answer_divergence(target, PROMPTS, tokens, theirs, Sampler(**settings))  # type: ignore[arg-type]
    for divergence, of_sampler in ((found, {}), (with_penalties, settings)):
        logits = penalised(read, target.model(input_ids=read).logits[:, -1], len(PROMPTS[1]), of_sampler)[0]
        gap = float(logits[tokens[1][5]] - logits[other])
        assert divergence is not None and divergence.logit_gap == pytest.approx(gap, abs=1e-4)
    assert found.logit_gap > 0
    assert str(found).startswith(f"answer token 5 is {tokens[1][5]} for us and {other} for the engine; ")


def test_the_first_draft_that_differs_is_found_with_the_gap_of_the_heads_logits(
    target: Target, head: Head, ours: list[Generation]
) -> None:
    assert not any(sum(generation.accepted_at) for generation in ours), "the random head is never right"
    theirs = [[0] * generation.rounds for generation in ours]
    assert first_draft_divergence(target, head, DRAFTS, PROMPTS, ours, theirs) is None
    theirs[2] = [0, 0, 2, *theirs[2][5:]]  # the engine accepted two drafts in the third round
    found = first_draft_divergence(target, head, DRAFTS, PROMPTS, ours, theirs)
    assert found is not None
    assert (found.what, found.prompt, found.position) == ("draft", 2, 3)
    assert found.theirs == ours[2].tokens[3]
    assert found.logit_gap > 0, "the head prefers its own draft"


def test_only_a_small_gap_between_logits_is_rounding() -> None:
    assert Divergence("answer", 0, 1, 4, 9, logit=22.5, logit_gap=0.13).is_rounding
    assert not Divergence("answer", 0, 1, 4, 9, logit=22.5, logit_gap=4.2).is_rounding
    assert Divergence("draft", 0, 1, 4, 9, logit=2.0, logit_gap=1.5).is_rounding, "a head's logits may be far apart"
