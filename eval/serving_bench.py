"""After stage 5: measures the speed of a serving engine as seen by a client, with and without the exported head.

Starts `vllm serve`, or with `serving.engine=llama_cpp` llama.cpp's `llama-server`, without drafts and with each K of
`serving_bench.num_speculative_tokens`, or uses the server at `serving.url`. Sends the prompts of `mtptrain acceptance`
at every concurrency, to vLLM with its own `vllm bench serve`. OpenVINO has no server and decodes them in a worker.
Reads `run_dir/export/ENGINE/` (or `serving.head_dir`, or `export.output_dir`), except with `serving.url`. Writes to
`run_dir/serving_bench/`: `report.json`, `plot.svg`, the times of all requests, and all logs. If it started vLLM and
drafting was faster at any concurrency, it also writes settings for engines with the fastest K, and a `README.md` with
the commands that use them. Prints a table.

With `serving_bench.break_even=true`, it measures instead whether a draft would pay, before anything is trained: see
`eval.serving_speed.break_even_measurement`.

    mtptrain serving-bench recipe=quickstart "serving_bench.num_speculative_tokens=[1,3,5]"
    mtptrain serving-bench recipe=quickstart serving.url=http://localhost:8000
    mtptrain serving-bench recipe=quickstart serving_bench.break_even=true
"""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from rich.table import Table

from mtptrain.command_line.program import command
from mtptrain.command_line.tables import wide_console
from mtptrain.config import PipelineConfig
from mtptrain.convert.engine_settings import remove_engine_settings, write_engine_settings
from mtptrain.decoding.prompts import check_head_context
from mtptrain.run import Run
from mtptrain.run_dir import claim_stage_dir, write_provenance, writing_output
from mtptrain.serving.bench_rows import Row, speeds_of
from mtptrain.serving.break_even import RoundCost, break_even_dir, read_costs
from mtptrain.serving.depth_choice import best_num_drafts
from mtptrain.serving.exports import read_serving_facts
from mtptrain.serving.llama_server import LlamaServer
from mtptrain.serving.openvino_load import check_openvino
from mtptrain.settings.evaluation import ServingEngine
from mtptrain.utils.files import write_sealed
from mtptrain.utils.masking import hide_passwords

from .engines import check_server, find_program, require_gguf, running_server
from .plots import drawing, plot_serving
from .serving_speed.break_even_measurement import measure_break_even
from .serving_speed.engine_runs import Bench, drafting_choices, measure


def main(config: PipelineConfig) -> None:
    given, is_break_even = config.serving_bench.output_dir, config.serving_bench.break_even
    default = break_even_dir(config) if is_break_even else config.stage_dir("serving_bench")
    with writing_output(given, "serving_bench.output_dir", default) as output_dir:
        if is_break_even:
            measure_break_even(config, output_dir)
            return
        bench = prepare(Run(config), output_dir)
        claim_stage_dir(output_dir, config)
        rows, version = measure(bench)
        write_provenance(output_dir, config, "report.json")
        write_results(bench, rows, version)


def prepare(run: Run, output_dir: Path) -> Bench:
    """Returns the checked inputs.

    Raises:
        UserError: the engine's program does not exist, or the prompts do not exist or do not fit the context of the
            target or the head, or the export does not exist or holds another head, or the server does not respond or
            does not fit the settings, or the report of `serving_bench.break_even` is damaged.
    """
    config, serving = run.config, run.config.serving
    most_drafts = max(drafting_choices(config))
    prompts = list(run.measured_prompts(2 * most_drafts).input_ids.values())
    server = None if serving.url is None else running_server(serving)
    program = None if isinstance(server, LlamaServer) else find_program(serving)  # vLLM's also sends the requests
    if serving.engine is ServingEngine.llama_cpp and server is None:
        require_gguf(run)
    if serving.engine is ServingEngine.openvino:
        check_openvino(config.head.name, config.serving_bench.concurrency, config.acceptance.temperature)
    head_dir = run.served_head_dir
    if server is not None:
        bench = Bench(config, output_dir, run.target, prompts, program, None, {}, head_dir, server)
        check_server(server, run.target, head_dir, bench.context_tokens)
        return bench
    read_costs(config, run.target)  # refuses a damaged report, which would otherwise stop `write_results`
    head = run.head(getattr(torch, config.acceptance.dtype), torch.device("cpu"))
    check_head_context(head.head, prompts, config.acceptance.max_new_tokens, most_drafts, "head")
    facts = read_serving_facts(head_dir, serving.engine, head.sha256)
    return Bench(config, output_dir, run.target, prompts, program, head.sha256, facts, head_dir, None)


def write_results(bench: Bench, rows: Sequence[Row], version: str) -> None:
    """Write the report, the plot and the engines' settings, and print the table."""
    config, settings = bench.config, bench.config.acceptance
    speeds, costs = speeds_of(rows), [] if bench.server else read_costs(config, bench.target)
    described = [row.describe(speeds, config.serving.engine, costs) for row in rows]
    report = {
        "command": command(),
        "date": date.today().isoformat(),
        "engine": str(config.serving.engine),
        "version": version,
        "url": hide_passwords(config.serving.url),
        "target": config.target.path,
        "head": None if bench.server else config.head.name,
        "head_sha256": bench.head_sha256,
        "prompts": len(bench.prompts),
        "requests": bench.num_requests,
        "repeats": config.serving_bench.repeats,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        **bench.types,
        "ignore_eos": config.serving_bench.ignore_eos,
        "best_num_speculative_tokens": {str(size): best for size, best in best_num_drafts(speeds).items()} or None,
        "rows": described,
    }
    path = bench.output_dir / "report.json"
    write_sealed(path, report)
    print_table(bench, rows, version, costs)
    remove_engine_settings(bench.output_dir)
    if bench.server is None and bench.engine is ServingEngine.vllm:
        served = bench.target.name_for_engines
        written = write_engine_settings(
            bench.output_dir, speeds, bench.facts, bench.head_dir, served, config.head, bench.target.config
        )
        print(written)
    with drawing(bench.output_dir / "plot.svg", path):
        (bench.output_dir / "plot.svg").write_text(plot_serving(described))


def print_table(bench: Bench, rows: Sequence[Row], version: str, costs: Sequence[RoundCost]) -> None:
    settings, speeds, engine = bench.config.acceptance, speeds_of(rows), bench.config.serving.engine
    sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    what = f"{bench.num_requests} requests per row, {sampling}, up to {settings.max_new_tokens} tokens"
    table = Table(
        title=f"{bench.engine_name} {version}: {what}",
        caption="TTFT and TPOT: medians over requests. ITL: ms between consecutive messages of a stream."
        + (" Predicted: speed-up by the costs of serving_bench.break_even." if costs else ""),
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
        *(["predicted"] if costs else []),
        "acceptance length",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        seen, num_drafts = row.latencies, row.num_speculative_tokens
        times = (seen.ttft_ms.p50, seen.tpot_ms.p50, seen.itl_ms.p50, seen.itl_ms.p99)
        gains = [row.speed_up(speeds), *([row.predicted_speed_up(engine, costs)] if costs else [])]
        table.add_row(
            "?" if num_drafts is None else str(num_drafts),
            str(row.concurrency),
            *(f"{each:,.1f}" for each in times),
            f"{seen.output_tokens_per_s:,.0f}",
            *("" if gain is None else f"{gain:.2f}" for gain in gains),
            "" if row.counts is None else f"{row.counts.acceptance_length:.3f}",
            end_section=row.concurrency == rows[-1].concurrency,
        )
    wide_console(108 if costs else 88).print(table)
