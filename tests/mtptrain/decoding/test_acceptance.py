"""Tests acceptance lengths, rates and intervals from counts, detection of loops, and batches of prompts."""

from typing import Any

import numpy as np
import pytest
import torch

from mtptrain.decoding.acceptance import generate_in_batches, has_loop, intervals, summarise, token_batches
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.heads.base import Head
from mtptrain.target.model import Target, TargetStates, Verified
from tests.mtptrain.decoding.drafting import random_head
from tests.mtptrain.decoding.test_speculate import random_prompts


def generation(rounds: int, accepted_at: list[int], empty_rounds: int = 0) -> Generation:
    return Generation([1], rounds, empty_rounds, rounds * len(accepted_at), accepted_at)


def test_counts_are_pooled_over_prompts_and_divided_once() -> None:
    found = summarise([generation(10, [9, 6, 3]), generation(2, [0, 0, 0])])
    assert found.acceptance_length == 1 + 18 / 12
    assert found.acceptance_rate == 18 / 36
    assert found.acceptance_rate_at == [9 / 12, 6 / 12, 3 / 12]
    assert found.acceptance_length_mean_of_prompts == (1 + 1.8 + 1) / 2
    assert (found.rounds, found.drafted, found.accepted, found.prompts) == (12, 36, 18, 2)


def test_rounds_without_a_draft_lower_the_tokens_per_step_only_and_nothing_generated_is_a_length_of_one() -> None:
    found = summarise([generation(10, [5], empty_rounds=10)])
    assert (found.acceptance_length, found.tokens_per_step) == (1.5, 1.25)
    assert summarise([generation(0, [0, 0])]).acceptance_length == 1.0


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        (list(range(40)), False),
        ([5, 4, 3, *[1, 2, 3, 4, 5, 6] * 6], True),
        ([*list(range(20)) * 2, 99], False),
        (list(range(20)) * 3, True),
        ([], False),
    ],
)
def test_a_loop_is_a_block_that_follows_itself_twice_over_32_tokens(tokens: list[int], is_loop: bool) -> None:
    assert has_loop(tokens) is is_loop


def test_intervals_contain_the_length_and_match_the_standard_error() -> None:
    """If n answers have equally many rounds, the interval is about the mean of their lengths +- 1.96 sd / sqrt(n)."""
    rng = np.random.default_rng(1)
    generations = [Generation([], 10, 0, 20, [int(count), 0]) for count in rng.binomial(10, 0.6, size=200)]
    alone = [[generation] for generation in generations]
    found, pooled = intervals(alone), summarise(generations)
    assert found is not None
    low, high = found.acceptance_length
    error = np.std([sum(each.accepted_at) / 10 for each in generations]) / len(generations) ** 0.5
    assert (pooled.acceptance_length - low, high - pooled.acceptance_length) == pytest.approx(
        (1.96 * error, 1.96 * error), rel=0.15
    )
    assert found.acceptance_rate_at[0] == pytest.approx((low - 1, high - 1))
    assert found.acceptance_rate_at[1] == (0.0, 0.0)
    assert found.tokens_per_step == found.acceptance_length
    assert intervals(alone) == found, "the same seed must give the same interval"
    twice = intervals([answers * 2 for answers in alone])
    assert twice is not None
    assert twice.acceptance_length == pytest.approx((low, high)), "two equal answers from one source are as one"


def test_one_source_gives_no_interval() -> None:
    """Resampling a single source always draws that source, so the interval would have no width."""
    answers = [generation(10, [9, 6]), generation(10, [3, 0])]
    assert intervals([answers]) is None
    found = intervals([[answer] for answer in answers])
    assert found is not None and found.acceptance_length[0] < found.acceptance_length[1]


@pytest.mark.parametrize(
    ("batch_size", "batch_tokens", "batches"),
    [
        (2, None, [[1, 3], [0, 4], [2]]),
        (2, 1000, [[1, 3], [0, 4], [2]]),
        (8, 60, [[1, 3, 0], [4], [2]]),  # three prompts padded to 10 tokens, with 10 new tokens each
        (8, 59, [[1, 3], [0], [4], [2]]),  # two prompts padded to 20 tokens, with 10 new tokens each, exceed 59
        (8, 1, [[1], [3], [0], [4], [2]]),  # a prompt too long for any batch is decoded alone
    ],
)
def test_batches_respect_the_bounds_on_prompts_and_tokens(
    batch_size: int, batch_tokens: int | None, batches: list[list[int]]
) -> None:
    lengths = [10, 5, 50, 8, 20]
    assert token_batches([], 10, batch_size, batch_tokens) == []
    assert token_batches(lengths, 10, batch_size, batch_tokens) == batches


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
