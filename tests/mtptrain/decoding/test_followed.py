"""Tests that drafts along a given text are those of a target that writes it."""

from typing import Any

import pytest
import torch

from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.heads.base import Head
from mtptrain.target.model import Target, TargetStates, Verified
from tests.mtptrain.decoding.drafting import random_head
from tests.mtptrain.decoding.test_speculate import random_prompts

K, NEW_TOKENS = 3, 12
PROMPTS = random_prompts(5)


@pytest.fixture(scope="module")
def head(target: Target) -> Head:
    return random_head(target)


def generate(target: Target, head: Head, **settings: Any) -> list[Generation]:
    drafter = HeadDrafter(head, target.parts, K)
    return generate_in_batches(target, drafter, PROMPTS, num_speculative_tokens=K, sampler=Sampler(), **settings)


def test_our_own_answers_give_our_own_rounds(target: Target, head: Head) -> None:
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_ids": [7], "batch_size": 2}
    ours = generate(target, head, **settings)
    assert generate(target, head, answers=[generation.tokens for generation in ours], **settings) == ours


def test_other_answers_are_drafted_from_the_states_of_these_answers(target: Target, head: Head) -> None:
    """Writes answers that accept 0, 1, 2 and 3 of the head's drafts in turn, and then differ from the next."""
    answers = []
    for prompt in PROMPTS:
        text = [*prompt, 5]
        for accepted in range(K + 1):
            drafts = drafts_after(target, head, text)
            text += drafts[:accepted]
            text.append((drafts[accepted] + 1) % 256 if accepted < K else 9)
        answers.append(text[len(prompt) :])
    generations = generate(
        target, head, answers=answers, max_new_tokens=len(answers[0]), eos_token_ids=(), batch_size=3
    )
    for answer, found in zip(answers, generations, strict=True):
        assert found.tokens == answer
        assert found.accepted_by_round == [0, 1, 2, 3] and found.accepted_at == [3, 2, 1]


def drafts_after(target: Target, head: Head, text: list[int]) -> list[int]:
    """Returns the drafts after a text, of whose tokens the target has read all but the newest."""
    tokens, positions = torch.tensor([text]), torch.arange(len(text) - 1)[None]
    states: TargetStates = target.forward(tokens[:, :-1], positions, target.cache(len(text) + K), head.read_layers)
    drafter = HeadDrafter(head, target.parts, K)
    drafter.start(1, len(text) + 2 * K)
    return drafter.draft(Verified(tokens, torch.tensor([len(text)]), positions, states), Sampler()).tokens[0].tolist()
