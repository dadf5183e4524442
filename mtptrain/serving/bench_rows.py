"""The figures of a serving benchmark: one row for each engine and concurrency."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtptrain.serving.break_even import RoundCost, predicted_speed_up
from mtptrain.serving.depth_choice import Speeds
from mtptrain.serving.engine import EngineCounts
from mtptrain.serving.load_generator import Latencies

MOST_DIFFERENT_TOKENS = 0.01
"""Warn if the numbers of output tokens of two rows differ by more than this share."""


@dataclass(frozen=True)
class Row:
    """One engine at one concurrency."""

    num_speculative_tokens: int | None
    """K; 0 for the engine without drafts, None for a running server, which does not report it."""
    concurrency: int
    latencies: Latencies
    counts: EngineCounts | None
    """None without drafts."""

    def speed_up(self, speeds: Speeds) -> float | None:
        """Returns output tokens/s relative to the engine without drafts; None for a running server."""
        if self.num_speculative_tokens is None:
            return None
        return self.latencies.output_tokens_per_s / speeds[self.concurrency][0]

    def predicted_speed_up(self, engine: str, costs: Sequence[RoundCost]) -> float | None:
        """Returns the speed-up that the acceptance length gives by the costs of rounds; None if these are unknown."""
        if self.counts is None:
            return None
        length = self.counts.acceptance_length
        return predicted_speed_up(costs, engine, self.concurrency, self.num_speculative_tokens, length)

    def describe(self, speeds: Speeds, engine: str, costs: Sequence[RoundCost]) -> dict[str, Any]:
        """Returns the figures for the report. `costs` are those of `serving_bench.break_even`, if they are known."""
        counts, names = self.counts, ("rounds", "drafted", "accepted_at", "acceptance_length")
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "concurrency": self.concurrency,
            **asdict(self.latencies),
            "output_tokens_per_s": self.latencies.output_tokens_per_s,
            "speed_up": self.speed_up(speeds),
            "predicted_speed_up": self.predicted_speed_up(engine, costs),
            **{name: counts and getattr(counts, name) for name in names},
        }


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the row with the most tokens/s at each concurrency, ordered by concurrency."""
    found: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.latencies.output_tokens_per_s):
        found[row.concurrency] = row
    return [found[concurrency] for concurrency in sorted(found)]


def speeds_of(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """Returns output tokens/s by concurrency and K. Leaves out rows of a running server, whose K is unknown."""
    speeds: dict[int, dict[int, float]] = {}
    for row in rows:
        if row.num_speculative_tokens is not None:
            tokens_per_s = speeds.setdefault(row.concurrency, {})
            tokens_per_s[row.num_speculative_tokens] = row.latencies.output_tokens_per_s
    return speeds


def warn_of_unequal_work(rows: Sequence[Row]) -> None:
    """Warn if the numbers of output tokens of two rows differ too much for their speeds to be comparable."""
    numbers = {row.latencies.output_tokens for row in rows}
    if max(numbers) > (1 + MOST_DIFFERENT_TOKENS) * min(numbers):
        warnings.warn(
            f"serving_bench: all runs must write the same number of tokens, but wrote {min(numbers):,} "
            f"to {max(numbers):,}, because rounding or sampling has changed where answers end; set "
            "serving_bench.ignore_eos=true for equal numbers",
            stacklevel=2,
        )
