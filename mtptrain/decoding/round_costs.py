"""Measures what decoding costs in our own loop: the seconds of each phase, and the number of rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads.base import Head
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Target
from mtptrain.utils.clock import PhaseClock

PromptIds = Sequence[Sequence[int]]
"""Token ids of prompts that are decoded together."""


@dataclass(frozen=True)
class Spent:
    """Tokens, rounds and seconds of decoding, summed over batches."""

    tokens: int = 0
    """Number of new tokens, excluding the first of each answer."""
    rounds: int = 0
    """Number of target forwards after the prompts, summed over batches."""
    own_rounds: int = 0
    """Number of rounds until each answer finished, summed over answers."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, by its name in `speculate.PHASES`."""

    def __add__(self, other: "Spent") -> "Spent":
        phases = {name: self.phases.get(name, 0.0) + other.phases.get(name, 0.0) for name in self.phases | other.phases}
        return Spent(self.tokens + other.tokens, self.rounds + other.rounds, self.own_rounds + other.own_rounds, phases)

    @property
    def seconds(self) -> float:
        """Seconds of all phases except `prompt`."""
        return sum(seconds for name, seconds in self.phases.items() if name != "prompt")

    @property
    def all_seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def seconds_per_round(self) -> float:
        return self.seconds / self.rounds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def drafters_of(head: Head, parts: FrozenParts, choices: Sequence[int], sample_drafts: bool) -> dict[int, Drafter]:
    """Returns a drafter of the head for each K, and plain decoding as K = 0."""
    drafters: dict[int, Drafter] = {0: NoDrafter()}
    return drafters | {count: HeadDrafter(head, parts, count, sample_drafts) for count in choices}


def fastest_in_turns(decode_with: Callable[[int], Spent], choices: Sequence[int], repeats: int) -> dict[int, Spent]:
    """Returns the fastest of `repeats` runs for each K. All K take turns, so that a busy machine slows all of them."""
    turns = [{count: decode_with(count) for count in choices} for _ in range(repeats)]
    return {count: min((turn[count] for turn in turns), key=lambda spent: spent.seconds) for count in choices}


def decode(
    target: Target, drafter: Drafter, prompts: PromptIds, num_drafts: int, max_new_tokens: int, sampler: Sampler
) -> Spent:
    """Returns what it costs to decode prompts together with K = `num_drafts`, 0 for none."""
    clock = PhaseClock(target.device)
    answers = speculate(
        target,
        drafter,
        prompts,
        num_speculative_tokens=num_drafts,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        clock=clock,
    )
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    rounds = [answer.rounds + answer.empty_rounds for answer in answers]
    return Spent(tokens, max(rounds), sum(rounds), clock.read())
