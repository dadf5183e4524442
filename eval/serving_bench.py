"""After stage 5: measures the speed of a serving engine as seen by a client, with and without the exported head.

Starts the engine of `serving.engine` without drafts and with each K of `serving_bench.num_speculative_tokens`, or uses
the server at `serving.url`. Sends the prompts of `mtptrain acceptance` at every concurrency. Reads
`run_dir/export/ENGINE/` (or `serving.head_dir`, or `export.output_dir`), except with `serving.url`. Writes to
`run_dir/serving_bench/`: `report.json`, `plot.svg`, the times of all requests, and all logs. If it started an engine
whose K can follow the batch size, and drafting was faster at any concurrency, it also writes the engine's settings with
the fastest K, and a `README.md` with the command that uses them. Prints a table.

    mtptrain serving-bench recipe=quickstart "serving_bench.num_speculative_tokens=[1,3,5]"
    mtptrain serving-bench recipe=quickstart serving.url=http://localhost:8000
"""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from mtptrain.cli import tables
from mtptrain.config import PipelineConfig
from mtptrain.decoding.prompts import read_prompts
from mtptrain.engines.base import RunningEngine, Served
from mtptrain.engines.exports import README
from mtptrain.engines.requests import Speeds, best_num_drafts
from mtptrain.engines.table import running_engine
from mtptrain.engines.verdict import bench_of, verdict
from mtptrain.run_dir import Run
from mtptrain.utils.figures import shown
from mtptrain.utils.files import read_sealed, write_json, write_sealed, write_text
from mtptrain.utils.masking import hide_passwords
from mtptrain.utils.startup import command

from .engines import find_served, find_server, output_folder, spare_tokens
from .loads import FEW_REQUESTS, Bench, Row, drafting_choices, measure, scratch_dir, speeds_of
from .plots import drawing, plot_serving
from .report_page import write_page

ENGINE_SETTINGS = "vllm.json"
"""vLLM is the only engine with such settings that mtptrain starts."""


def main(config: PipelineConfig) -> None:
    stage_dir = output_folder(config, "serving_bench")
    with stage_dir.writing() as output_dir:
        bench = prepare(Run(config), output_dir)
        stage_dir.claim(config)
        with scratch_dir(output_dir) as scratch:
            rows, version = measure(bench, scratch)
        stage_dir.record(config, "report.json")
        write_results(bench, rows, version)


def prepare(run: Run, output_dir: Path) -> Bench:
    config, most_drafts = run.config, max(drafting_choices(run.config))
    concurrency = max(config.serving_bench.concurrency)
    asked = read_prompts(
        config.acceptance, config.prompts, run.target, run.stage_dir("prompts"), spare_tokens(most_drafts)
    )
    prompts = list(asked.input_ids.values())
    if (server := find_server(run, prompts, most_drafts)) is not None:
        return Bench(config, prompts, output_dir, server)
    served = find_served(run, prompts, most_drafts, output_dir, concurrency)
    engine = running_engine(config.serving.engine)
    engine.check_bench(config.head.name, concurrency, config.acceptance.temperature)
    return Bench(config, prompts, output_dir, served)


def write_results(bench: Bench, rows: Sequence[Row], version: str) -> None:
    config, settings, serving = bench.config, bench.config.acceptance, bench.config.serving
    served = bench.served if isinstance(bench.served, Served) else None
    engine, speeds = running_engine(serving.engine), speeds_of(rows)
    described = [row.describe(speeds) for row in rows]
    report = {
        "command": command(),
        "date": date.today().isoformat(),
        "engine": str(serving.engine),
        "version": version,
        "url": hide_passwords(serving.url),
        "target": config.target.path,
        "head": served and config.head.name,
        "head_sha256": served and served.facts["head_sha256"],
        "prompts": len(bench.prompts),
        "requests": bench.num_requests,
        "repeats": config.serving_bench.repeats,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        **(engine.report_types(served.target, serving, served.dtype) if served else {"dtype": None}),
        "ignore_eos": config.serving_bench.ignore_eos,
        "best_num_speculative_tokens": {str(size): best for size, best in best_num_drafts(speeds).items()} or None,
        "rows": described,
    }
    path = bench.output_dir / "report.json"
    write_sealed(path, report)
    print_table(bench, described, f"{engine.name} {version}")
    for name in (ENGINE_SETTINGS, README):
        (bench.output_dir / name).unlink(missing_ok=True)  # of an earlier run
    if served and bench.num_requests < FEW_REQUESTS:
        print(
            f"which K is fastest is not said from {bench.num_requests} requests: leave out serving_bench.num_requests"
        )
    elif served:
        print(write_engine_settings(bench.output_dir, speeds, served, engine))
    with drawing(bench.output_dir / "plot.svg", path):
        (bench.output_dir / "plot.svg").write_text(plot_serving(described))
    measured = config.acceptance_dir / "report.json"
    if measured.is_file():
        acceptance = read_sealed(measured, "run mtptrain acceptance again")
        if (of_head := bench_of(config, acceptance)) is not None:
            write_page(acceptance, config.acceptance_dir, of_head)
            print(verdict(acceptance, of_head))


def write_engine_settings(output_dir: Path, speeds: Speeds, served: Served, engine: RunningEngine) -> str:
    """Write the engine's settings with the fastest K at each batch size, and `README.md` with the command that uses
    them; returns a line that says what was found.

    Nothing is written if the engine has no such settings, or if decoding without drafts is always the fastest.
    """
    best = best_num_drafts(speeds)
    if not any(best.values()):
        return "decoding without drafts was the fastest at every concurrency: serve the target without the head"
    path = (output_dir / ENGINE_SETTINGS).resolve()
    fastest = "fastest K by requests in flight: " + ", ".join(f"{count} at {size}" for size, count in best.items())
    if (found := engine.settings_for(speeds, served, path)) is None:
        return fastest
    settings, text = found
    write_json(path, settings)
    write_text(output_dir / README, f"# The fastest number of drafts at each batch size\n\n{text}\n")
    return f"{fastest}; settings and command: {output_dir / README}"


def print_table(bench: Bench, rows: Sequence[dict[str, Any]], engine_version: str) -> None:
    """Print the described rows. A running server does not say its K, and has no speed-up."""
    settings = bench.config.acceptance
    sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    what = f"{bench.num_requests} requests per row, {sampling}, up to {settings.max_new_tokens} tokens"
    caption = "TTFT and TPOT: medians over requests. ITL: ms between consecutive messages of a stream."
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "K": lambda row: "?" if row["num_speculative_tokens"] is None else str(row["num_speculative_tokens"]),
        "in flight": lambda row: str(row["concurrency"]),
        "TTFT ms": lambda row: f"{row['ttft_ms']['p50']:,.1f}",
        "TPOT ms": lambda row: f"{row['tpot_ms']['p50']:,.1f}",
        "ITL P50": lambda row: f"{row['itl_ms']['p50']:,.1f}",
        "P99": lambda row: f"{row['itl_ms']['p99']:,.1f}",
        "tokens/s": lambda row: f"{row['output_tokens_per_s']:,.0f}",
        "speed-up": lambda row: shown(row["speed_up"], 2),
        "acceptance length": lambda row: shown(row["acceptance_length"]),
    }
    cells = [[shown(row) for shown in columns.values()] for row in rows]
    tables.print_table(f"{engine_version}: {what}", tuple(columns), cells, caption)
