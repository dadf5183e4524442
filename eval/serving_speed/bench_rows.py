"""The table of a serving benchmark: one row for each K and concurrency."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mtptrain.engines.requests import EngineCounts, LoadResult, Speeds
from mtptrain.planning.break_even import RoundCost, predicted_speed_up

MOST_DIFFERENT_TOKENS = 0.01
"""Warn if the numbers of output tokens of two rows differ by more than this share."""


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of a latency over requests or messages, in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Returns the spread of times in seconds; zeros if there are none."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        return cls(*(1e3 * float(each) for each in (np.mean(seconds), *np.percentile(seconds, [50, 99]))))


@dataclass(frozen=True)
class Row:
    """One engine at one concurrency. Latencies are defined as those of `vllm bench serve`."""

    num_speculative_tokens: int | None
    """K; 0 for the engine without drafts, None for a running server, which does not report it."""
    concurrency: int
    requests: int
    output_tokens: int
    duration_s: float
    """Seconds from the first request to the last token."""
    ttft_ms: Spread
    """Time to the first token of each request, from when it was sent."""
    tpot_ms: Spread
    """Time per output token after the first: one value per request with at least two tokens."""
    itl_ms: Spread
    """Time between consecutive steps of an answer. A step gives several tokens with drafts."""
    step_ms: float
    """Mean time between consecutive steps without the slowest tenth, in which the engine also read other prompts."""
    counts: EngineCounts | None
    """None without drafts."""

    @classmethod
    def of(cls, num_speculative_tokens: int | None, concurrency: int, result: LoadResult) -> "Row":
        """Returns the row of a load."""
        answers = result.answers
        gaps = [later - step for answer in answers for step, later in pairwise(answer.steps_s)]
        return cls(
            num_speculative_tokens,
            concurrency,
            requests=len(answers),
            output_tokens=sum(answer.num_tokens for answer in answers),
            duration_s=result.duration_s,
            ttft_ms=Spread.of([answer.steps_s[0] for answer in answers]),
            tpot_ms=Spread.of(
                [
                    (answer.steps_s[-1] - answer.steps_s[0]) / (answer.num_tokens - 1)
                    for answer in answers
                    if answer.num_tokens > 1
                ]
            ),
            itl_ms=Spread.of(gaps),
            step_ms=Spread.of(sorted(gaps)[: math.ceil(0.9 * len(gaps))]).mean,
            counts=result.counts,
        )

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    def speed_up(self, speeds: Speeds) -> float | None:
        """Returns output tokens/s relative to the engine without drafts; None for a running server."""
        if self.num_speculative_tokens is None:
            return None
        return self.output_tokens_per_s / speeds[self.concurrency][0]

    def predicted_speed_up(self, engine: str, costs: Sequence[RoundCost]) -> float | None:
        """Returns the speed-up that the acceptance length gives by the costs of rounds; None if these are unknown."""
        if self.counts is None:
            return None
        length = self.counts.acceptance_length
        return predicted_speed_up(costs, engine, self.concurrency, self.num_speculative_tokens, length)

    def describe(self, speeds: Speeds, engine: str, costs: Sequence[RoundCost]) -> dict[str, Any]:
        """Returns the figures for the report. `costs` are those of `serving_bench.break_even`, if they are known."""
        figures, names = asdict(self), ("rounds", "drafted", "accepted_at", "acceptance_length")
        del figures["counts"]
        return {
            **figures,
            "output_tokens_per_s": self.output_tokens_per_s,
            "speed_up": self.speed_up(speeds),
            "predicted_speed_up": self.predicted_speed_up(engine, costs),
            **{name: self.counts and getattr(self.counts, name) for name in names},
        }


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the row with the most tokens/s at each concurrency, ordered by concurrency."""
    found: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.output_tokens_per_s):
        found[row.concurrency] = row
    return [found[concurrency] for concurrency in sorted(found)]


def speeds_of(rows: Sequence[Row]) -> Speeds:
    """Returns output tokens/s by concurrency and K. Leaves out rows of a running server, whose K is unknown."""
    speeds: Speeds = {}
    for row in rows:
        if row.num_speculative_tokens is not None:
            speeds.setdefault(row.concurrency, {})[row.num_speculative_tokens] = row.output_tokens_per_s
    return speeds


def warn_of_unequal_work(rows: Sequence[Row]) -> None:
    """Warn if the numbers of output tokens of two rows differ too much for their speeds to be comparable."""
    numbers = {row.output_tokens for row in rows}
    if max(numbers) > (1 + MOST_DIFFERENT_TOKENS) * min(numbers):
        warnings.warn(
            f"serving_bench: all runs must write the same number of tokens, but wrote {min(numbers):,} "
            f"to {max(numbers):,}, because rounding or sampling has changed where answers end; set "
            "serving_bench.ignore_eos=true for equal numbers",
            stacklevel=2,
        )
