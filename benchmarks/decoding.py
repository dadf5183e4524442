"""Compares decoding with drafts to plain decoding: the cost of a round, the speed-up, and the best K.

    python -m benchmarks.decoding recipe=quickstart
    python -m benchmarks.decoding recipe=quickstart --batch-sizes 1 4 32 --drafts 1 2 3 4 5 6

Reads the head and the prompts of `mtptrain acceptance`. Plain decoding and the head with every K take turns on each
batch, and the fastest of `--repeats` runs of a batch counts. Tokens/s exclude the prompt and the first new token;
answers have exactly `acceptance.max_new_tokens` tokens. Batches are full: the last prompts that do not fill one are not
measured, so the number of prompts may differ between batch sizes.

A batch takes as long as its slowest answer; `refilled` estimates the speed-up if new prompts replaced finished ones, as
with an engine's continuous batching.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from mtptrain.config import AcceptanceConfig, PipelineConfig, check_depths
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.prompts import check_head_context, read_prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads.base import Head
from mtptrain.init_from.start import trained_or_initial_head
from mtptrain.run import Run
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import init_ranks
from mtptrain.utils.errors import UserError

from .command import Row, positive, print_table, run_benchmark

COLUMNS = {
    "batch size": ("batch_size", "d"),
    "prompts": ("num_prompts", "d"),
    "K": ("num_speculative_tokens", "d"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "speed-up": ("speed_up", ".2f"),
    "refilled": ("refilled_speed_up", ".2f"),
    "tokens/round": ("tokens_per_own_round", ".2f"),
    "draft, ms": ("draft_ms", ".2f"),
    "verify, ms": ("verify_ms", ".2f"),
}
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
    """Seconds of each phase after the prompt, by its name in `speculate.PHASES`."""

    def __add__(self, other: "Spent") -> "Spent":
        phases = {name: self.phases.get(name, 0.0) + other.phases.get(name, 0.0) for name in self.phases | other.phases}
        return Spent(self.tokens + other.tokens, self.rounds + other.rounds, self.own_rounds + other.own_rounds, phases)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class LoopBench:
    """Decodes prompts with each K of a head, and plainly as K = 0, and says what that costs."""

    def __init__(self, target: Target, head: Head, choices: Sequence[int], settings: AcceptanceConfig) -> None:
        self.target, self.settings = target, settings
        self.drafters: dict[int, Drafter] = {0: NoDrafter()}
        self.drafters |= {count: HeadDrafter(head, target.parts, count, settings.sample_drafts) for count in choices}

    def fastest(self, prompts: PromptIds, repeats: int) -> dict[int, Spent]:
        """Returns the fastest of `repeats` runs for each K. All take turns, so a busy machine slows all of them."""
        length = self.settings.max_new_tokens
        turns = [{count: self.decode(count, prompts, length) for count in self.drafters} for _ in range(repeats)]
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
        phases, rounds = clock.read(), [answer.rounds + answer.empty_rounds for answer in answers]
        phases.pop("prompt", None)
        return Spent(sum(len(answer.tokens) - 1 for answer in answers), max(rounds), sum(rounds), phases)


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    if config.acceptance.max_new_tokens < 2:
        raise UserError(
            "acceptance.max_new_tokens: must be at least 2, because the first token is not timed, but is "
            f"{config.acceptance.max_new_tokens}; raise it"
        )
    for num_drafts in options.drafts:
        check_depths(config.head, "--drafts", num_drafts)
    ranks, settings = init_ranks(config.distributed_timeout_hours), config.acceptance
    run, dtype = Run(config), getattr(torch, settings.dtype)
    found = trained_or_initial_head(run.stage_dir("train"), config.head, run.target, dtype, ranks.device)
    prompts_dir, most_drafts = run.stage_dir("prompts"), max(options.drafts)
    prompts = read_prompts(settings, config.prompts, run.target, prompts_dir, spare_tokens=most_drafts)
    measured = list(prompts.input_ids.values())[: options.prompts]
    if len(measured) < max(options.batch_sizes):
        raise UserError(
            f"--batch-sizes: must be at most {len(measured)}, the number of prompts, but the largest is "
            f"{max(options.batch_sizes)}; lower it, or raise --prompts and acceptance.num_prompts, or add lines to "
            "acceptance.prompts_file"
        )
    check_head_context(found.head, measured, settings.max_new_tokens, max(options.drafts), "head")
    loop = LoopBench(
        load_target(run.target.directory, dtype, ranks.device), found.head, sorted(options.drafts), settings
    )
    print_table(
        "Decoding",
        COLUMNS,
        [row for size in options.batch_sizes for row in rows_of(loop, measured, size, options.repeats)],
    )


def rows_of(loop: LoopBench, prompts: PromptIds, size: int, repeats: int) -> list[Row]:
    """Returns a row for each K with full batches of the first prompts; K = 0 is plain decoding."""
    for num_drafts in loop.drafters:  # the first rounds of each shape are slower
        loop.decode(num_drafts, prompts[:size], WARMUP_TOKENS)
    measured = dict.fromkeys(loop.drafters, Spent())
    batches = [prompts[first : first + size] for first in range(0, len(prompts) - size + 1, size)]
    for batch in tqdm(batches, desc=f"batches of {size}", unit="batch"):
        fastest = loop.fastest(batch, repeats)
        measured = {num_drafts: measured[num_drafts] + spent for num_drafts, spent in fastest.items()}
    sizes = {"batch_size": size, "num_prompts": len(batches) * size}
    return [sizes | describe(num_drafts, measured) for num_drafts in loop.drafters]


def describe(num_drafts: int, measured: dict[int, Spent]) -> Row:
    """Returns the figures of one K from what decoding took, by K; phases are in milliseconds per round."""
    spent, plain = measured[num_drafts], measured[0]
    per_round = spent.seconds / spent.rounds
    return {
        "num_speculative_tokens": num_drafts,
        "tokens_per_s": spent.tokens_per_s,
        "speed_up": spent.tokens_per_s / plain.tokens_per_s,
        "refilled_speed_up": spent.tokens / spent.own_rounds * plain.seconds / plain.rounds / per_round,
        "tokens_per_own_round": spent.tokens / spent.own_rounds,
        **{f"{name}_ms": spent.phases.get(name, 0.0) / spent.rounds * 1e3 for name in ("draft", "verify")},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32], help="prompts decoded together")
    parser.add_argument("--drafts", type=positive, nargs="+", default=[1, 2, 3, 4, 5], help="values of K")
    parser.add_argument("--prompts", type=positive, default=32, help="prompts that are measured")
    run_benchmark(main, parser)
