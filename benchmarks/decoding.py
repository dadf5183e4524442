"""Compares decoding with drafts to plain decoding: the cost of a round, the speed-up, and the best K.

    python -m benchmarks.decoding recipe=quickstart
    python -m benchmarks.decoding recipe=quickstart --batch-sizes 1 4 32 --drafts 1 2 3 4 5 6

Reads the head and the prompts of `mtptrain acceptance`. Plain decoding and the head with every K take turns on each
batch, and the fastest of `--repeats` runs of a batch counts. Tokens/s exclude the prompt and the first new token;
answers have exactly `acceptance.max_new_tokens` tokens. Batches are full: the last prompts that do not fill one are not
measured, so the number of prompts may differ between batch sizes.

A batch takes as long as its slowest answer; `refilled` estimates the speed-up if new prompts replaced finished ones, as
with an engine's continuous batching. If `serving_bench.break_even` was measured, `break-even` is the speed-up that its
costs give for the measured acceptance.

Writes `report.json` to `run_dir/bench_decode/`, and adds it to the page of `mtptrain acceptance` if that page is about
the same head, prompts and settings.
"""

import argparse
from typing import Any

import torch
from tqdm import tqdm

from eval.report_page import DECODING_COLUMNS, SAME_DECODING, fastest_choices, write_run_page
from mtptrain.config import PipelineConfig, check_depths
from mtptrain.decoding.prompts import check_head_context
from mtptrain.decoding.round_costs import LoopBench, PromptIds, Spent
from mtptrain.decoding.speculate import PHASES
from mtptrain.planning.break_even import OWN_LOOP, predicted_speed_up, read_costs
from mtptrain.run import Run
from mtptrain.stage_dir import StageDir
from mtptrain.target.loading import load_target
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed

from .command import Row, positive, print_table, run_benchmark

COLUMNS = DECODING_COLUMNS | {"prompts": ("num_prompts", "d"), "break-even": ("break_even_speed_up", ".2f")}


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    if config.acceptance.max_new_tokens < 2:
        raise UserError(
            "acceptance.max_new_tokens: must be at least 2, because the first token is not timed, but is "
            f"{config.acceptance.max_new_tokens}; raise it"
        )
    for num_drafts in options.drafts:
        check_depths(config.head, "--drafts", num_drafts)
    stage_dir = StageDir(config.stage_dir("bench_decode"))
    with stage_dir.writing() as output_dir:
        report = measure(config, options)
        stage_dir.record(config, "report.json")
        write_sealed(output_dir / "report.json", report)
    print_table("Decoding", COLUMNS, report["rows"])
    print(fastest_choices(report["rows"]))
    write_run_page(config)


def measure(config: PipelineConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the head with every K, and returns the report."""
    ranks, settings = init_ranks(config.distributed_timeout_hours), config.acceptance
    run, dtype, num_new = Run(config), getattr(torch, settings.dtype), settings.max_new_tokens
    found = run.head(dtype, ranks.device)
    prompts = run.measured_prompts(spare_tokens=max(options.drafts))
    measured = list(prompts.input_ids.values())[: options.prompts]
    if len(measured) < max(options.batch_sizes):
        raise UserError(
            f"--batch-sizes: must be at most {len(measured)}, the number of prompts, but the largest is "
            f"{max(options.batch_sizes)}; lower it, or raise --prompts and acceptance.num_prompts, or add lines to "
            "acceptance.prompts_file"
        )
    check_head_context(found.head, measured, num_new, max(options.drafts), "head")
    costs = read_costs(config, run.target)  # refuses a damaged report before the long work
    target = load_target(run.target.directory, dtype, ranks.device)
    loop = LoopBench(target, found.head, sorted(options.drafts), settings)
    rows = [row for size in options.batch_sizes for row in rows_of(loop, measured, size, num_new, options.repeats)]
    for row in rows:  # comparable with the refilled speed-up, in which no round waits for the slowest answer
        size, num_drafts, length = row["batch_size"], row["num_speculative_tokens"], row["tokens_per_own_round"]
        row["break_even_speed_up"] = predicted_speed_up(costs, OWN_LOOP, size, num_drafts, length)
    facts = {"head_sha256": found.sha256, "prompts_sha256": prompts.sha256, "device": device_name(ranks.device)}
    sampling = {name: getattr(settings, name) for name in SAME_DECODING if name not in facts}
    return {"command": options.command, **facts, **sampling, "rows": rows}


def rows_of(loop: LoopBench, prompts: PromptIds, size: int, max_new_tokens: int, repeats: int) -> list[Row]:
    """Returns a row for each K with full batches of the first prompts; K = 0 is plain decoding."""
    loop.warm_up(prompts[:size])
    measured = dict.fromkeys(loop.drafters, Spent())
    batches = [prompts[first : first + size] for first in range(0, len(prompts) - size + 1, size)]
    for batch in tqdm(batches, desc=f"batches of {size}", unit="batch"):
        fastest = loop.fastest(batch, max_new_tokens, repeats)
        measured = {num_drafts: measured[num_drafts] + spent for num_drafts, spent in fastest.items()}
    sizes = {"batch_size": size, "num_prompts": len(batches) * size}
    return [sizes | describe(num_drafts, measured) for num_drafts in loop.drafters]


def describe(num_drafts: int, measured: dict[int, Spent]) -> Row:
    """Returns the figures of one K from what decoding took, by K; phases are in milliseconds per round."""
    spent, plain = measured[num_drafts], measured[0]
    per_round = {name: spent.phases.get(name, 0.0) / spent.rounds * 1e3 for name in PHASES if name != "prompt"}
    return {
        "num_speculative_tokens": num_drafts,
        "tokens_per_s": spent.tokens_per_s,
        "speed_up": spent.tokens_per_s / plain.tokens_per_s,
        "speed_up_with_prompt": plain.all_seconds / spent.all_seconds * spent.tokens / plain.tokens,
        "refilled_speed_up": spent.tokens / spent.own_rounds * plain.seconds_per_round / spent.seconds_per_round,
        "tokens_per_own_round": spent.tokens / spent.own_rounds,
        **{f"{name}_ms": milliseconds for name, milliseconds in per_round.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[1, 8, 32], help="prompts decoded together")
    parser.add_argument("--drafts", type=positive, nargs="+", default=[1, 2, 3, 4, 5], help="values of K")
    parser.add_argument("--prompts", type=positive, default=32, help="prompts that are measured")
    run_benchmark(main, parser)
