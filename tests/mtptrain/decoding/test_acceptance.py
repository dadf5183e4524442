"""Tests acceptance lengths, rates and intervals from counts, detection of loops, and batches of prompts."""

import numpy as np
import pytest

from mtptrain.decoding.acceptance import generate_in_batches, has_loop, intervals, summarise, token_batches
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.target.model import Target
from tests.mtptrain.decoding.drafting import decode, draft_after, random_head
from tests.mtptrain.decoding.test_speculate import random_prompts


def generation(rounds: int, accepted_at: list[int], empty_rounds: int = 0) -> Generation:
    return Generation([1], rounds, empty_rounds, rounds * len(accepted_at), accepted_at)


def test_counts_are_pooled_over_prompts_and_divided_once() -> None:
    pooled = summarise([generation(10, [9, 6, 3]), generation(2, [0, 0, 0])])
    assert pooled.acceptance_length == 1 + 18 / 12
    assert pooled.acceptance_rate == 18 / 36
    assert pooled.acceptance_rate_at == [9 / 12, 6 / 12, 3 / 12]
    assert pooled.acceptance_length_mean_of_prompts == (1 + 1.8 + 1) / 2
    assert (pooled.rounds, pooled.drafted, pooled.accepted, pooled.prompts) == (12, 36, 18, 2)
    with_empty = summarise([generation(10, [5], empty_rounds=10)])
    assert (with_empty.acceptance_length, with_empty.tokens_per_step) == (1.5, 1.25)
    nothing, plain = summarise([generation(0, [0, 0])]), summarise([generation(0, [], empty_rounds=3)])
    assert (nothing.acceptance_length, nothing.acceptance_rate_at, nothing.tokens_per_step) == (None, [None] * 2, None)
    assert (plain.acceptance_length, plain.acceptance_rate, plain.tokens_per_step) == (None, None, 1.0)


def test_a_loop_is_a_block_that_follows_itself_twice_over_32_tokens() -> None:
    for loop in ([7] * 32, [5, 4, 3, *[1, 2, 3, 4, 5, 6] * 6], list(range(20)) * 3):
        assert has_loop(loop)
    for text in ([7] * 31, list(range(40)), [*list(range(20)) * 2, 99], []):
        assert not has_loop(text)


def test_intervals_contain_the_length_and_match_the_standard_error() -> None:
    """If n answers have equally many rounds, the interval is about the mean of their lengths +- 1.96 sd / sqrt(n)."""
    rng = np.random.default_rng(1)
    generations = [Generation([], 10, 0, 20, [int(count), 0]) for count in rng.binomial(10, 0.6, size=200)]
    alone = [[generation] for generation in generations]
    resampled, length = intervals(alone), summarise(generations).acceptance_length
    assert resampled is not None and resampled.acceptance_length is not None and length is not None
    low, high = resampled.acceptance_length
    error = 1.96 * np.std([sum(each.accepted_at) / 10 for each in generations]) / len(generations) ** 0.5
    assert (length - low, high - length) == pytest.approx((error, error), rel=0.15)
    assert resampled.acceptance_rate_at[0] == pytest.approx((low - 1, high - 1))
    assert resampled.acceptance_rate_at[1] is None, "an interval without a width is no evidence"
    assert resampled.tokens_per_step == resampled.acceptance_length
    assert intervals(alone) == resampled, "the same seed must give the same interval"
    twice = intervals([answers * 2 for answers in alone])
    assert twice is not None
    assert twice.acceptance_length == pytest.approx((low, high)), "two equal answers from one source are as one"
    assert intervals([generations]) is None, "one source would give an interval without a width"


def test_batches_respect_the_bounds_on_prompts_and_tokens() -> None:
    for batch_size, batch_tokens, batches in (
        (2, None, [[1, 3], [0, 4], [2]]),
        (8, 60, [[1, 3, 0], [4], [2]]),  # three prompts padded to 10 tokens, with 10 new tokens each
        (8, 59, [[1, 3], [0], [4], [2]]),  # two prompts padded to 20 tokens, with 10 new tokens each, exceed 59
        (8, 1, [[1], [3], [0], [4], [2]]),  # a prompt too long for any batch is decoded alone
    ):
        assert token_batches([10, 5, 50, 8, 20], 10, batch_size, batch_tokens) == batches


K, PROMPTS = 3, random_prompts(5)


def continued(target: Target, sampler: Sampler, answers: list[list[int]], max_new_tokens: int) -> list[Generation]:
    """Returns what is generated with a random head after given answers."""
    drafter = HeadDrafter(random_head(target), target.parts, K)
    settings = {"num_speculative_tokens": K, "max_new_tokens": max_new_tokens, "eos_token_ids": (), "batch_size": 3}
    return generate_in_batches(target, drafter, PROMPTS, sampler=sampler, answers=answers, **settings)  # type: ignore[arg-type]


def test_given_answers_are_drafted_from_the_states_of_these_answers(target: Target) -> None:
    """Writes answers that accept 0, 1, 2 and 3 of the head's drafts in turn, and then differ from the next."""
    head, answers = random_head(target), []
    for prompt in PROMPTS:
        text = [*prompt, 5]
        for accepted in range(K + 1):
            drafts = draft_after(target, HeadDrafter(head, target.parts, K), text).tokens[0].tolist()
            text += drafts[:accepted]
            text.append((drafts[accepted] + 1) % 256 if accepted < K else 9)
        answers.append(text[len(prompt) :])
    generations = continued(target, Sampler(), answers, len(answers[0]))
    for answer, generation in zip(answers, generations, strict=True):
        assert generation.tokens == answer
        assert generation.accepted_by_round == [0, 1, 2, 3] and generation.accepted_at == [3, 2, 1]


def test_past_the_end_of_a_given_answer_the_target_chooses_with_the_samplers_penalties(target: Target) -> None:
    sampler = Sampler(repetition_penalty=1.5)
    whole = [each.tokens for each in decode(target, NoDrafter(), PROMPTS, sampler=sampler)]
    begun = [tokens[:10] for tokens in whole]
    assert [each.tokens for each in continued(target, sampler, begun, 24)] == whole
