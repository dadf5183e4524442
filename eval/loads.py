"""Starts engines one after another, sends them the same prompts, and describes what clients and counters saw.

A row is one K at one concurrency. Latencies are defined as those of `vllm bench serve`.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mtptrain.config import PipelineConfig
from mtptrain.engines.base import Served
from mtptrain.engines.load import send_all
from mtptrain.engines.requests import EngineCounts, Load, LoadResult, Requests, Speeds
from mtptrain.engines.server import EngineServer
from mtptrain.engines.table import running_engine
from mtptrain.utils.errors import warn
from mtptrain.utils.files import write_json

SCRATCH = ".scratch"
"""Name of the folder for converted models, which is removed at the end or by the next benchmark."""
FEW_REQUESTS = 4
"""Number of requests below which nothing is said of the fastest K."""
MOST_DIFFERENT_TOKENS = 0.01
"""Warn if the numbers of output tokens of two rows differ by more than this share."""


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns mean and quantiles of a latency over requests or messages, in milliseconds; zeros if there are none."""
    times = np.array(seconds or [0.0]) * 1e3
    return {"mean": float(times.mean()), "p50": float(np.median(times)), "p99": float(np.percentile(times, 99))}


@dataclass(frozen=True)
class Row:
    """One engine at one concurrency."""

    num_speculative_tokens: int | None
    """K; 0 for the engine without drafts, None for a running server, which does not report it."""
    concurrency: int
    requests: int
    output_tokens: int
    duration_s: float
    """Seconds from the first request to the last token."""
    ttft_ms: dict[str, float]
    """Time to the first token of each request, from when it was sent."""
    tpot_ms: dict[str, float]
    """Time per output token after the first: one value per request with at least two tokens."""
    itl_ms: dict[str, float]
    """Time between consecutive steps of an answer. A step gives several tokens with drafts."""
    counts: EngineCounts | None
    """None without drafts."""

    @classmethod
    def of(cls, num_speculative_tokens: int | None, concurrency: int, result: LoadResult) -> "Row":
        answers = result.answers
        gaps = [later - step for answer in answers for step, later in pairwise(answer.steps_s)]
        several = [answer for answer in answers if answer.num_tokens > 1]
        return cls(
            num_speculative_tokens,
            concurrency,
            requests=len(answers),
            output_tokens=sum(answer.num_tokens for answer in answers),
            duration_s=result.duration_s,
            ttft_ms=spread_ms([answer.steps_s[0] for answer in answers]),
            tpot_ms=spread_ms([(each.steps_s[-1] - each.steps_s[0]) / (each.num_tokens - 1) for each in several]),
            itl_ms=spread_ms(gaps),
            counts=result.counts,
        )

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    def describe(self, speeds: Speeds) -> dict[str, Any]:
        """Returns the figures for the report. Speed-ups are relative to the engine without drafts."""
        figures = asdict(self)
        del figures["counts"]
        none = dict.fromkeys(("rounds", "drafted", "accepted_at", "acceptance_length"))
        plain = None if self.num_speculative_tokens is None else speeds[self.concurrency][0]
        speed_up = plain and self.output_tokens_per_s / plain
        return {**figures, "output_tokens_per_s": self.output_tokens_per_s, "speed_up": speed_up} | (
            none if self.counts is None else self.counts.describe()
        )


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the row with the most tokens/s at each concurrency, ordered by concurrency."""
    by_concurrency = {row.concurrency: row for row in sorted(rows, key=lambda row: row.output_tokens_per_s)}
    return [by_concurrency[concurrency] for concurrency in sorted(by_concurrency)]


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
        warn(
            f"serving_bench: all runs must write the same number of tokens, but wrote {min(numbers):,} "
            f"to {max(numbers):,}, because rounding or sampling has changed where answers end; set "
            "serving_bench.ignore_eos=true for equal numbers"
        )


@dataclass(frozen=True)
class Bench:
    """The inputs of the benchmark, checked before an engine starts."""

    config: PipelineConfig
    prompts: Sequence[Sequence[int]]
    output_dir: Path
    served: Served | EngineServer
    """For an engine that is started here, what it serves; otherwise the running server of `serving.url`."""

    @property
    def num_requests(self) -> int:
        settings = self.config.serving_bench
        return settings.num_requests or max(len(self.prompts), FEW_REQUESTS, *settings.concurrency)


def drafting_choices(config: PipelineConfig) -> list[int]:
    return sorted(set(config.serving_bench.num_speculative_tokens)) or [config.acceptance.num_speculative_tokens]


@contextmanager
def scratch_dir(output_dir: Path) -> Iterator[Path]:
    """Yields an empty folder below `output_dir`, and removes it afterwards."""
    directory = output_dir / SCRATCH
    shutil.rmtree(directory, ignore_errors=True)  # left by a benchmark that was killed
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def measure(bench: Bench, scratch: Path) -> tuple[list[Row], str]:
    """Returns a row for each K and concurrency, and the engine's version. Writes the times of all answers.

    An engine is warmed up by as many requests as will be in flight. It then runs all concurrencies, and all again for
    each further repeat.
    """
    acceptance, settings = bench.config.acceptance, bench.config.serving_bench
    requests = Requests(
        bench.prompts,
        acceptance.max_new_tokens,
        acceptance.temperature,
        acceptance.top_p,
        acceptance.top_k,
        settings.ignore_eos,
        acceptance.seed,
    )
    rows: list[Row] = []
    version = ""
    for num_drafts in [None] if isinstance(bench.served, EngineServer) else [0, *drafting_choices(bench.config)]:
        name = "server" if num_drafts is None else f"K{num_drafts}"
        largest = max(settings.concurrency)
        warmup = Load(f"{name}_warmup", largest, largest)
        if num_drafts is not None:
            what = f"{bench.config.serving.engine} {f'with K = {num_drafts}' if num_drafts else 'without drafts'}"
            print(f"{what}: starts, answers a warm-up of {largest}, which is not counted, then is measured")
        loads = [warmup] + [
            Load(f"{name}_concurrency{concurrency}_run{run}", bench.num_requests, concurrency)
            for run in range(1, settings.repeats + 1)
            for concurrency in settings.concurrency
        ]
        if isinstance(bench.served, EngineServer):
            version, results = send_all(bench.served, requests, loads)
        else:
            engine = running_engine(bench.config.serving.engine)
            version, results = engine.run_loads(bench.served, num_drafts or 0, requests, loads, scratch)
        for load, result in zip(loads, results, strict=True):
            write_json(bench.output_dir / f"load_{load.name}.json", asdict(result))
        measured = list(zip(loads, results, strict=True))[1:]
        rows += fastest([Row.of(num_drafts, load.concurrency, result) for load, result in measured])
    warn_of_unequal_work(rows)
    return rows, version
