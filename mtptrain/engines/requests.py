"""The requests to a serving engine, its answers, and what it counts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.speculate import Generation
from mtptrain.utils.figures import Figure, share

ROUNDING_TOLERANCE, ROUNDED_DRAFTS = 0.02, 2
"""Largest allowed relative difference of acceptance lengths in bf16 or with rounded weights, and the number of drafts
that may be accepted differently beside it."""
TOLERANCE = f"{100 * ROUNDING_TOLERANCE:g} % and {ROUNDED_DRAFTS} drafts"
Speeds = dict[int, dict[int, float]]
"""Output tokens/s by concurrency and K; K = 0 is the engine without drafts."""


@dataclass(frozen=True)
class EngineCounts:
    """An engine's drafting counters, summed over all requests of a run."""

    rounds: int
    """Number of verified drafts, which engines call num_drafts."""
    drafted: int | None
    """None if the engine does not report it."""
    accepted_at: list[int]
    """Number of rounds that accepted the draft at each position [K]."""

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> "EngineCounts":
        """Returns our own counters: every round drafts K tokens, and those past an answer's end count too."""
        ours = summarise(generations)
        return cls(ours.rounds, ours.drafted, ours.accepted_at)

    @classmethod
    def of_rounds(cls, accepted: Sequence[Sequence[int]], num_drafts: int) -> "EngineCounts":
        """Returns the counters of an engine that says how many drafts each round of each answer accepted, of K."""
        rounds = [num_accepted for answer in accepted for num_accepted in answer]
        depths = range(max((num_drafts, *rounds)))
        return cls(len(rounds), None, [sum(depth < num for num in rounds) for depth in depths])

    @property
    def acceptance_length(self) -> Figure:
        return share(self.rounds + sum(self.accepted_at), self.rounds)

    def describe(self) -> dict[str, Any]:
        """Returns the counts and the acceptance length, as reports have them."""
        return asdict(self) | {"acceptance_length": self.acceptance_length}

    def is_equal(self, theirs: "EngineCounts") -> bool:
        """Returns whether another side counts the same; drafted tokens only where both report them."""
        drafted = self.drafted if theirs.drafted is None else theirs.drafted
        return (self.rounds, self.drafted, self.accepted_at) == (theirs.rounds, drafted, theirs.accepted_at)

    def is_near(self, theirs: "EngineCounts", drafts: int = ROUNDED_DRAFTS) -> bool:
        """Returns whether the acceptance lengths of both sides, on the same answers, agree up to rounding and `drafts`
        that one side accepts and the other does not."""
        mine, other = self.acceptance_length, theirs.acceptance_length
        if mine is None or other is None:
            return mine is other
        return abs(other - mine) <= ROUNDING_TOLERANCE * mine + drafts / self.rounds


@dataclass(frozen=True)
class EngineRun:
    version: str
    tokens: list[list[int]]
    """New tokens for each prompt, including the stop token."""
    counts: EngineCounts | None
    """None for an engine without drafts."""
    accepted_by_round: list[list[int]] | None
    """Number of accepted drafts in each round of each prompt; None if the engine does not report them."""
    chat_ids: list[int] | None = None
    """The prompt of the chat that was asked for."""


class Manner(StrEnum):
    """What requests set beside the prompt and the largest number of new tokens; a server adds the rest."""

    neutral = "neutral"
    """All that changes a choice: greedy decoding without penalties, and the ends of answers."""
    greedy = "temperature 0"
    """Only the temperature, which is 0."""
    plain = "nothing"


class Questions(NamedTuple):
    """Prompts, and how they are asked."""

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    manner: Manner = Manner.neutral
    chat: Mapping[str, Any] | None = None
    """Messages, and arguments of the chat template, whose token ids an engine is asked for."""
    concurrency: int = 1
    """Number of requests in flight."""


class Question(NamedTuple):
    """A prompt, and everything with which a server is asked for an answer that becomes training data."""

    model: str
    prompt: list[int]
    """Token ids."""
    max_new_tokens: int
    sampling: Mapping[str, Any]
    """The settings of `generation.NEUTRAL`."""
    stop_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Requests:
    prompts: Sequence[Sequence[int]]
    """Token ids. They repeat if there are fewer prompts than requests."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    ignore_eos: bool
    seed: int
    """Request i of a load has seed + i."""


@dataclass(frozen=True)
class Load:
    """A number of requests, of which at most `concurrency` are in flight at any time."""

    name: str
    num_requests: int
    concurrency: int


@dataclass(frozen=True)
class Answer:
    steps_s: list[float]
    """Seconds from the request to each step that gave tokens."""
    num_tokens: int


@dataclass(frozen=True)
class LoadResult:
    answers: list[Answer]
    duration_s: float
    """Seconds from the first request to the end of the last answer."""
    counts: EngineCounts | None
    """None without drafts."""


def accepted_within(generations: Sequence[Generation], num_last: int = 0) -> list[list[int]]:
    """Returns the number of accepted drafts in each round of our answers, up to the end of each answer.

    The last `num_last` tokens of an answer do not count.
    """
    accepted = []
    for generation in generations:
        rounds, left = [], len(generation.tokens) - 1 - num_last  # the target chose the first token itself
        for num_accepted in generation.accepted_by_round:
            rounds.append(min(num_accepted, left))
            left -= num_accepted + 1
        accepted.append(rounds)
    return accepted


def load_result(load: Mapping[str, Any], num_drafts: int) -> LoadResult:
    """Returns the result of a load from what a worker says of it: the steps of its answers, and what they accepted."""
    answers = [Answer(*each) for each in zip(load["steps_s"], load["num_tokens"], strict=True)]
    counts = EngineCounts.of_rounds(load["accepted"], num_drafts) if num_drafts else None
    return LoadResult(answers, load["duration_s"], counts)


def best_num_drafts(speeds: Speeds) -> dict[int, int]:
    """Returns the fastest K at each concurrency. If several are equally fast, the smallest is chosen."""
    return {
        concurrency: max(sorted(tokens_per_s), key=lambda num_drafts: tokens_per_s[num_drafts])
        for concurrency, tokens_per_s in sorted(speeds.items())
    }
