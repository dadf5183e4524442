"""Starts engines one after another, sends them the same prompts, and returns what the client and the counters saw."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.serving_speed.bench_rows import Row, fastest, warn_of_unequal_work
from mtptrain.config import PipelineConfig
from mtptrain.engines.base import Served
from mtptrain.engines.load import send_all
from mtptrain.engines.requests import Load, LoadResult, Requests
from mtptrain.engines.server import EngineServer
from mtptrain.engines.table import running_engine
from mtptrain.utils.files import write_json

SCRATCH = ".scratch"
"""Name of the folder for random heads and converted models, which is removed at the end or by the next benchmark."""


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
        return settings.num_requests or max(len(self.prompts), *settings.concurrency)


def drafting_choices(config: PipelineConfig) -> list[int]:
    """Returns K of each engine that drafts."""
    return config.serving_bench.num_speculative_tokens or [config.acceptance.num_speculative_tokens]


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

    Raises:
        UserError: an engine or a request failed.
    """
    rows: list[Row] = []
    version = ""
    for num_drafts in [None] if isinstance(bench.served, EngineServer) else [0, *drafting_choices(bench.config)]:
        warmup, loads = loads_of(bench, "server" if num_drafts is None else f"K{num_drafts}")
        version, results = run_loads(bench, num_drafts, [*warmup, *loads], scratch)
        for load, result in zip([*warmup, *loads], results, strict=True):
            write_json(bench.output_dir / f"load_{load.name}.json", asdict(result))
        measured = zip(loads, results[len(warmup) :], strict=True)
        rows += fastest([Row.of(num_drafts, load.concurrency, result) for load, result in measured])
    warn_of_unequal_work(rows)
    return rows, version


def loads_of(bench: Bench, name: str) -> tuple[list[Load], list[Load]]:
    """Returns the loads that warm an engine up, and those that are measured: all concurrencies, then all again."""
    settings = bench.config.serving_bench
    warmup = Load(f"{name}_warmup", settings.warmup_requests, max(settings.concurrency))
    loads = [
        Load(f"{name}_concurrency{concurrency}_run{run}", bench.num_requests, concurrency)
        for run in range(1, settings.repeats + 1)
        for concurrency in settings.concurrency
    ]
    return [warmup] if settings.warmup_requests else [], loads


def run_loads(
    bench: Bench, num_drafts: int | None, loads: Sequence[Load], scratch: Path
) -> tuple[str, list[LoadResult]]:
    """Returns the engine's version and the results of loads, with K = `num_drafts` or by the running server."""
    settings = bench.config.acceptance
    requests = Requests(
        bench.prompts,
        settings.max_new_tokens,
        settings.temperature,
        settings.top_p,
        settings.top_k,
        bench.config.serving_bench.ignore_eos,
        settings.seed,
    )
    if isinstance(bench.served, EngineServer):
        return send_all(bench.served, requests, loads)
    assert num_drafts is not None
    return running_engine(bench.config.serving.engine).run_loads(bench.served, num_drafts, requests, loads, scratch)
