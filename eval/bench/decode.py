"""Compares decoding with drafts to plain decoding in one run: the cost of a round, the speed-up, and the best K.

    python -m eval.bench.decode recipe=quickstart
    python -m eval.bench.decode recipe=quickstart "bench.batch_sizes=[1,4,32]" "bench.draft_depths=[1,2,3,4,5,6]" \
        bench.out=decode.json

Reads the head and the prompts of `mtptrain acceptance`. Plain decoding and the head with every K take turns on each
batch, and the fastest of `bench.repeats` runs of a batch counts. Tokens/s exclude the prompt and the first new token;
answers have exactly `acceptance.max_new_tokens` tokens. Batches are full: the last prompts that do not fill one are not
measured, so `num_prompts` may differ between batch sizes.

A batch takes as long as its slowest answer; `refilled` estimates the speed-up if new prompts replaced finished ones, as
with an engine's continuous batching. If `serving_bench.break_even` was measured, `break-even` is the speed-up that its
costs give for the measured acceptance.

Writes `report.json` and a chart to `run_dir/bench_decode/`, and adds both to the page of `mtptrain acceptance` if that
page is about the same head, prompts and settings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from tqdm import tqdm

from mtptrain.command_line.program import command, run_program
from mtptrain.command_line.tables import wide_console
from mtptrain.config import BENCH, BenchConfig, PipelineConfig, check_depths
from mtptrain.decoding.prompts import check_head_context
from mtptrain.decoding.prompts_file import Prompts
from mtptrain.decoding.round_costs import LoopBench, PromptIds, Spent
from mtptrain.decoding.speculate import PHASES
from mtptrain.heads.base import Head
from mtptrain.run import Run
from mtptrain.run_dir import write_provenance, writing
from mtptrain.serving.break_even import OWN_LOOP, RoundCost, predicted_speed_up, read_costs
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json, write_sealed

from ..plots import drawing
from ..report_page import write_run_page

DecodingRow = dict[str, Any]
"""The figures for one batch size and K."""
COLUMNS = {
    "batch": ("batch_size", "d"),
    "prompts": ("num_prompts", "d"),
    "K": ("num_speculative_tokens", "d"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "speed-up": ("speed_up", ".2f"),
    "with prompt": ("speed_up_with_prompt", ".2f"),
    "refilled": ("refilled_speed_up", ".2f"),
    "break-even": ("break_even_speed_up", ".2f"),
    "tokens/round": ("tokens_per_own_round", ".2f"),
    "draft ms": ("draft_ms", ".2f"),
    "verify ms": ("verify_ms", ".2f"),
    "choose ms": ("choose_ms", ".2f"),
}
"""The columns of the printed table, with the entry of a row and its format."""


def main(config: PipelineConfig) -> None:
    check(config)
    output_dir = config.stage_dir("bench_decode")
    with writing(output_dir):
        measure_decoding(config, output_dir)


def measure_decoding(config: PipelineConfig, output_dir: Path) -> None:
    """Measure the head with every K, and write and print the report."""
    ranks, settings = init_ranks(config.distributed_timeout_hours), config.acceptance
    run, dtype = Run(config), getattr(torch, settings.dtype)
    found = run.head(dtype, ranks.device)
    prompts = run.measured_prompts(spare_tokens=max(config.bench.draft_depths))
    measured = prompts_to_measure(config.bench, prompts)
    check_head_context(found.head, measured, settings.max_new_tokens, max(config.bench.draft_depths), "head")
    costs = read_costs(config, run.target)  # refuses a damaged report before the long work
    rows = measure(config, load_target(run.target.directory, dtype, ranks.device), found.head, measured)
    add_break_even(rows, costs)
    report = {
        "command": command(),
        "head_sha256": found.sha256,
        "prompts_sha256": prompts.sha256,
        "device": device_name(ranks.device),
        **{
            name: getattr(settings, name)
            for name in ("temperature", "top_p", "top_k", "sample_drafts", "max_new_tokens")
        },
        "dtype": str(settings.dtype),
        "rows": rows,
    }
    write_provenance(output_dir, config, "report.json")
    write_sealed(output_dir / "report.json", report)
    if config.bench.out:
        write_json(Path(config.bench.out), {BENCH: "decode", **report})
    print_table(rows)
    with drawing(output_dir / "report.svg", output_dir / "report.json"):
        draw(rows, output_dir / "report.svg")
    write_run_page(config)


def check(config: PipelineConfig) -> None:
    """Raises UserError for settings that cannot be measured."""
    if config.acceptance.max_new_tokens < 2:
        raise UserError(
            "acceptance.max_new_tokens: must be at least 2, because the first token is not timed, but is "
            f"{config.acceptance.max_new_tokens}; raise it"
        )
    for num_drafts in config.bench.draft_depths:
        check_depths(config.head, "bench.draft_depths", num_drafts)


def prompts_to_measure(bench: BenchConfig, prompts: Prompts) -> PromptIds:
    """Returns the first `bench.decode_prompts` prompts.

    Raises:
        UserError: they cannot fill the largest batch.
    """
    found = list(prompts.input_ids.values())[: bench.decode_prompts]
    if len(found) < max(bench.batch_sizes):
        raise UserError(
            f"bench.batch_sizes: must be at most {len(found)}, the number of prompts, but the largest is "
            f"{max(bench.batch_sizes)}; lower it, or raise bench.decode_prompts and acceptance.num_prompts, or add "
            "lines to acceptance.prompts_file"
        )
    return found


def measure(config: PipelineConfig, target: Target, head: Head, prompts: PromptIds) -> list[DecodingRow]:
    """Returns a row for each batch size and K; K = 0 is plain decoding."""
    settings, bench = config.acceptance, config.bench
    loop = LoopBench(target, head, sorted(bench.draft_depths), settings)
    rows: list[DecodingRow] = []
    for batch_size in bench.batch_sizes:
        loop.warm_up(prompts[:batch_size])
        measured, batches = dict.fromkeys(loop.drafters, Spent()), full_batches(prompts, batch_size)
        for batch in tqdm(batches, desc=f"batches of {batch_size}", unit="batch"):
            fastest = loop.fastest(batch, settings.max_new_tokens, bench.repeats)
            measured = {num_drafts: measured[num_drafts] + spent for num_drafts, spent in fastest.items()}
        num_prompts = {"num_prompts": len(batches) * batch_size}
        rows += [describe(batch_size, num_drafts, measured) | num_prompts for num_drafts in loop.drafters]
    return rows


def full_batches(prompts: PromptIds, batch_size: int) -> list[PromptIds]:
    """Returns batches of the first prompts, without the last ones if these do not fill a batch."""
    return [prompts[first : first + batch_size] for first in range(0, len(prompts) - batch_size + 1, batch_size)]


def describe(batch_size: int, num_drafts: int, measured: dict[int, Spent]) -> DecodingRow:
    """Returns one row of the table from what decoding took, by K; phases are in milliseconds per round."""
    spent, plain = measured[num_drafts], measured[0]
    per_round = {name: spent.phases.get(name, 0.0) / spent.rounds * 1e3 for name in PHASES if name != "prompt"}
    return {
        "batch_size": batch_size,
        "num_speculative_tokens": num_drafts,
        "tokens_per_s": spent.tokens_per_s,
        "speed_up": spent.tokens_per_s / plain.tokens_per_s,
        "speed_up_with_prompt": plain.all_seconds / spent.all_seconds * spent.tokens / plain.tokens,
        "refilled_speed_up": spent.tokens / spent.own_rounds * plain.seconds_per_round / spent.seconds_per_round,
        "tokens_per_own_round": spent.tokens / spent.own_rounds,
        **{f"{name}_ms": milliseconds for name, milliseconds in per_round.items()},
    }


def add_break_even(rows: Sequence[DecodingRow], costs: Sequence[RoundCost]) -> None:
    """Add the speed-up that the costs of `serving_bench.break_even` and a row's acceptance give, None without costs.

    It is comparable with the refilled speed-up, in which no round waits for the slowest answer of a batch.
    """
    for row in rows:
        size, num_drafts, length = row["batch_size"], row["num_speculative_tokens"], row["tokens_per_own_round"]
        row["break_even_speed_up"] = predicted_speed_up(costs, OWN_LOOP, size, num_drafts, length)


def recommended(rows: Sequence[DecodingRow], batch_size: int) -> int:
    """Returns the K that decodes fastest, or 0 if plain decoding is fastest."""
    fastest = max((row for row in rows if row["batch_size"] == batch_size), key=lambda row: float(row["speed_up"]))
    return int(fastest["num_speculative_tokens"])


def print_table(rows: Sequence[DecodingRow]) -> None:
    table, has_costs = Table(title="Decoding"), any(row["break_even_speed_up"] for row in rows)
    columns = {name: column for name, column in COLUMNS.items() if has_costs or name != "break-even"}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = {name: "" if row[key] is None else format(row[key], form) for name, (key, form) in columns.items()}
        is_best = row["num_speculative_tokens"] == recommended(rows, row["batch_size"])
        cells["K"] = f"{row['num_speculative_tokens'] or 'none'}{' *' if is_best else ''}"
        table.add_row(*cells.values())
    console = wide_console(130)
    console.print(table)
    console.print("* the K that decodes fastest")
    if has_costs:
        console.print("break-even: the refilled speed-up by the costs of serving_bench.break_even")


def draw(rows: Sequence[DecodingRow], path: Path) -> None:
    """Plots speed-up against K with a curve for each batch size."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for batch_size in dict.fromkeys(row["batch_size"] for row in rows):
        curve = [row for row in rows if row["batch_size"] == batch_size]
        num_drafts = [row["num_speculative_tokens"] for row in curve]
        label = f"batches of {batch_size}: K = {recommended(rows, batch_size) or 'none'}"
        axes.plot(num_drafts, [row["speed_up"] for row in curve], marker="o", label=label)
    axes.axhline(1.0, color="#999", linewidth=0.8)
    axes.set(xlabel="K, 0 for plain decoding", ylabel="speed-up over plain decoding", ylim=(0, None))
    axes.legend(title="fastest")
    figure.savefig(path, format="svg")


if __name__ == "__main__":
    run_program(main)
