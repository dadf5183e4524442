"""Measures acceptance: decodes prompts, and turns the counts of rounds into lengths, rates and confidence intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.followed import FollowedTarget
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, Round, speculate
from mtptrain.target.model import Target
from mtptrain.utils.figures import Figure, share, shown
from mtptrain.utils.progress import ProgressBar

Interval = tuple[float, float] | None
MAX_LOOP_PERIOD, MIN_LOOP_TOKENS = 64, 32


@dataclass(frozen=True)
class Acceptance:
    """Acceptance. Counts are pooled over rounds and ranks, then divided once; without data they are None."""

    acceptance_length: Figure
    """Tokens per round with drafts, including the bonus token: 1 + accepted / rounds, as in vLLM."""
    acceptance_rate: Figure
    """Accepted tokens over drafted tokens."""
    acceptance_rate_at: list[Figure]
    """Share of all rounds with drafts that accepted the draft at each position [K].

    It is not conditional on the acceptance of earlier positions.
    """
    acceptance_length_mean_of_prompts: Figure
    """The acceptance length of each prompt, averaged over the prompts with drafts."""
    tokens_per_step: Figure
    """Tokens per forward of the target, over the rounds with and without drafts."""
    rounds: int
    """Number of rounds with drafts."""
    empty_rounds: int
    """Number of rounds without drafts."""
    drafted: int
    """Number of drafted tokens."""
    accepted: int
    """Number of accepted tokens, without bonus tokens."""
    accepted_at: list[int]
    """Number of rounds that accepted the draft at each position [K]."""
    prompts: int
    """Number of prompts that were answered. Each turn of a conversation has a prompt of its own."""


def summarise(generations: Sequence[Generation]) -> Acceptance:
    num_depths = max((len(generation.accepted_at) for generation in generations), default=0)
    accepted_at = [sum(generation.accepted_at[depth] for generation in generations) for depth in range(num_depths)]
    rounds = sum(generation.rounds for generation in generations)
    empty_rounds = sum(generation.empty_rounds for generation in generations)
    steps = rounds + empty_rounds
    drafted, accepted = sum(generation.drafted for generation in generations), sum(accepted_at)
    lengths = [generation.acceptance_length for generation in generations if generation.rounds]
    return Acceptance(
        acceptance_length=share(rounds + accepted, rounds),
        acceptance_rate=share(accepted, drafted),
        acceptance_rate_at=[share(count, rounds) for count in accepted_at],
        acceptance_length_mean_of_prompts=share(sum(lengths), len(lengths)),
        tokens_per_step=share(steps + accepted, steps),
        rounds=rounds,
        empty_rounds=empty_rounds,
        drafted=drafted,
        accepted=accepted,
        accepted_at=accepted_at,
        prompts=len(generations),
    )


@dataclass(frozen=True)
class Intervals:
    """95 % confidence intervals (low, high), by a bootstrap that resamples whole sources; see `intervals`."""

    acceptance_length: Interval
    acceptance_rate_at: list[Interval]
    tokens_per_step: Interval


def intervals(sources: Sequence[Sequence[Generation]], draws: int = 2000, seed: int = 0) -> Intervals | None:
    """Returns confidence intervals for what `summarise` would report on other prompts of the same kind.

    `sources` has the answers by the file or question that their prompts come from, because those of one are not
    independent. With fewer than two sources there are no intervals: all draws would be the same, without any width.
    An interval without a width, since all sources have the same figure, is no evidence and None.
    """
    if len(sources) < 2:
        return None
    per_source = ([(each.rounds, each.empty_rounds, *each.accepted_at) for each in answers] for answers in sources)
    counts = np.array([np.sum(rows, axis=0) for rows in per_source], dtype=np.float64)  # [sources, 2 + K]
    weights = np.random.default_rng(seed).multinomial(  # [draws, sources]
        len(counts), np.full(len(counts), 1 / len(counts)), draws
    )
    rounds, empty_rounds, *accepted_at = (weights @ counts).T
    accepted = np.sum(accepted_at, axis=0)

    def interval(sums: np.ndarray, of: np.ndarray) -> Interval:
        has_data = of > 0
        low, high = np.quantile(sums[has_data] / of[has_data], (0.025, 0.975)) if has_data.any() else (0.0, 0.0)
        return (float(low), float(high)) if low < high else None

    steps = rounds + empty_rounds
    return Intervals(
        acceptance_length=interval(rounds + accepted, rounds),
        acceptance_rate_at=[interval(count, rounds) for count in accepted_at],
        tokens_per_step=interval(steps + accepted, steps),
    )


def has_loop(tokens: Sequence[int]) -> bool:
    """Returns whether a block of at most 64 tokens occurs at least three times in a row, over 32 tokens or more.

    Greedy decoding of a small model gets caught in such loops, where drafting is easy.
    """
    array = np.asarray(tokens)
    for period in range(1, min(MAX_LOOP_PERIOD, len(array) // 3) + 1):
        longest = run = 0
        for repeats in array[period:] == array[:-period]:
            run = run + 1 if repeats else 0
            longest = max(longest, run)
        if longest >= max(2 * period, MIN_LOOP_TOKENS - period):
            return True
    return False


def token_batches(
    lengths: Sequence[int], max_new_tokens: int, batch_size: int, batch_tokens: int | None
) -> list[list[int]]:
    """Returns the indices of the prompts in each batch: prompts of similar length together, the shortest first.

    A batch has at most `batch_size` prompts and, unless it is None, `batch_tokens` tokens, counting every padded prompt
    and its answer. A prompt that exceeds this limit by itself gets its own batch.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        size = len(batches[-1]) + 1 if batches else 0  # including this prompt, the longest so far
        fits = batch_tokens is None or size * (lengths[index] + max_new_tokens) <= batch_tokens
        if batches and size <= batch_size and fits:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def generate_in_batches(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    sampler: Sampler,
    eos_token_ids: Sequence[int],
    batch_size: int,
    batch_tokens: int | None = None,
    description: str | None = None,
    observe: Callable[[Round], None] | None = None,
    answers: Sequence[Sequence[int]] | None = None,
) -> list[Generation]:
    """Decode many prompts, those of similar length together, and return the results in the order of the prompts.

    The arguments are those of `speculate` and `token_batches`. `description` is the text of the progress bar; None
    shows no bar. In greedy decoding the target writes the `answers`, if there are any, instead of its own choices.
    """
    batches = token_batches([len(prompt) for prompt in prompts], max_new_tokens, batch_size, batch_tokens)
    generations: dict[int, Generation] = {}

    def seen(each: Round) -> None:
        if observe is not None:
            observe(each)
        if target.device.type == "cpu":  # a GPU would have to be waited for
            bar.add_tokens(each.num_tokens())

    is_silent = description is None
    with ProgressBar(total=len(prompts), desc=description, unit="prompt", disable=is_silent, miniters=0) as bar:
        for indices in batches:
            asked = [prompts[index] for index in indices]
            batch = speculate(
                target if answers is None else FollowedTarget(target, asked, [answers[index] for index in indices]),
                drafter,
                asked,
                num_speculative_tokens=num_speculative_tokens,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                eos_token_ids=eos_token_ids,
                observe=observe if is_silent else seen,
            )
            generations |= dict(zip(indices, batch, strict=True))
            bar.update(len(indices))
            done, num_tokens = summarise(list(generations.values())), sum(len(x.tokens) for x in generations.values())
            bar.add_tokens(num_tokens - bar.num_tokens, f", acceptance length {shown(done.acceptance_length, 2)}")
    return [generations[index] for index in range(len(prompts))]
