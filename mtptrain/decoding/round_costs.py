"""Measures what decoding costs in our own loop: the seconds of each phase, and the number of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mtptrain.config import AcceptanceConfig
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads.base import Head
from mtptrain.target.model import Target
from mtptrain.utils.clock import PhaseClock

WARMUP_TOKENS = 3
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


class LoopBench:
    """Decodes prompts with each K of a head, and plainly as K = 0, and says what that costs."""

    def __init__(self, target: Target, head: Head, choices: Sequence[int], settings: AcceptanceConfig) -> None:
        """
        Args:
            target: the target.
            head: a head on the target's device.
            choices: the values of K above 0.
            settings: how drafts are sampled and accepted.
        """
        self.target, self.settings = target, settings
        self.drafters: dict[int, Drafter] = {0: NoDrafter()}
        self.drafters |= {count: HeadDrafter(head, target.parts, count, settings.sample_drafts) for count in choices}

    def warm_up(self, prompts: PromptIds) -> None:
        """Decode a few tokens with each K, because the first rounds of each shape are slower."""
        for num_drafts in self.drafters:
            self.decode(num_drafts, prompts, WARMUP_TOKENS)

    def fastest(self, prompts: PromptIds, max_new_tokens: int, repeats: int) -> dict[int, Spent]:
        """Returns the fastest of `repeats` runs for each K. All take turns, so a busy machine slows all of them."""
        turns = [
            {count: self.decode(count, prompts, max_new_tokens) for count in self.drafters} for _ in range(repeats)
        ]
        return {count: min((turn[count] for turn in turns), key=lambda spent: spent.seconds) for count in self.drafters}

    def decode(self, num_drafts: int, prompts: PromptIds, max_new_tokens: int) -> Spent:
        """Returns what it costs to decode prompts together with K = `num_drafts`."""
        clock, settings = PhaseClock(self.target.device), self.settings
        answers = speculate(
            self.target,
            self.drafters[num_drafts],
            prompts,
            num_speculative_tokens=num_drafts,
            max_new_tokens=max_new_tokens,
            sampler=Sampler(settings.temperature, settings.seed, settings.top_p, settings.top_k),
            clock=clock,
        )
        tokens = sum(len(answer.tokens) - 1 for answer in answers)
        rounds = [answer.rounds + answer.empty_rounds for answer in answers]
        return Spent(tokens, max(rounds), sum(rounds), clock.read())
