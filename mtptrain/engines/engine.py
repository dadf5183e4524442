"""The requests to a serving engine, its answers, and what it counts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.speculate import Generation

NEUTRAL_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters with which only temperature, top_p and top_k change a request's distribution.

A server takes each parameter that a request leaves out from the model's generation_config.json. Penalties affect greedy
decoding too.
"""

ROUNDING_TOLERANCE, ROUNDED_DRAFTS = 0.02, 2
"""Largest allowed relative difference of acceptance lengths in bf16 or with rounded weights, and the number of drafts
that may be accepted differently beside it."""
TOLERANCE = f"{100 * ROUNDING_TOLERANCE:g} % and {ROUNDED_DRAFTS} drafts"


@dataclass(frozen=True)
class EngineCounts:
    """An engine's drafting counters, summed over all requests of a run."""

    rounds: int
    """Number of verified drafts, which engines call num_drafts."""
    drafted: int | None
    """None if the engine does not report it."""
    accepted_at: list[int]
    """Number of rounds that accepted the draft at each position [K]."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_at) / max(self.rounds, 1)


@dataclass(frozen=True)
class EngineRun:
    """An engine's output for a list of prompts."""

    version: str
    tokens: list[list[int]]
    """New tokens for each prompt, including the stop token."""
    counts: EngineCounts | None
    """None for an engine without drafts."""
    accepted_by_round: list[list[int]] | None
    """Number of accepted drafts in each round of each prompt; None if the engine does not report them."""
    error: str = ""
    """The engine's error, if it failed; there are then neither tokens nor counts."""


class Decoder(ABC):
    """An engine with a head, as `mtptrain serving-check` sees it: one that runs, or that starts when it is asked."""

    name: str
    """The engine's name that users know."""
    advice: str
    """The advice if the engine's counters differ from ours by more than rounding."""
    why_no_drafts = ""
    """Why the engine may draft nothing without saying so, for the end of a message."""
    how_to_see_rounds = ""
    """How the engine is made to report the drafts accepted in each round, for the end of a message."""

    @property
    @abstractmethod
    def may_round(self) -> bool:
        """Whether the engine rounds weights, whatever `acceptance.dtype` is."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew.

        Raises:
            UserError: the engine does not answer, or other requests changed its counters.
        """

    @abstractmethod
    def counted(
        self,
        generations: Sequence[Generation],
        num_speculative_tokens: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> tuple[EngineCounts, str]:
        """Returns what this engine counts for our answers, and a sentence on its rules if they changed the counts."""


@dataclass(frozen=True)
class Requests:
    """The requests of a benchmark."""

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
    """The answer to one request of a load."""

    steps_s: list[float]
    """Seconds from the request to each step that gave tokens."""
    num_tokens: int


@dataclass(frozen=True)
class LoadResult:
    """The answers to a load."""

    answers: list[Answer]
    duration_s: float
    """Seconds from the first request to the end of the last answer."""
    counts: EngineCounts | None
    """None without drafts."""


def counts_of_all_rounds(generations: Sequence[Generation]) -> EngineCounts:
    """Returns our own counters: every round drafts K tokens, and counts those accepted past the end of the answer."""
    ours = summarise(generations)
    return EngineCounts(ours.rounds, ours.drafted, ours.accepted_at)
