"""Measures whether a draft pays on this machine before anything is trained, for `mtptrain serving-bench`.

Builds the recipe's head with random weights, and decodes prompts of `acceptance.prompt_tokens` random tokens, first in
our own loop and then in the engine, if it is installed. Answers have `NEW_TOKENS` tokens. In the engine, a round takes
the time between two steps of a stream. All tokens of a round arrive together, so accepted drafts do not matter.

Writes `report.json`, `plot.svg` and all logs to `run_dir/serving_bench/break_even/`.
"""

import gc
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedConfig

from mtptrain.cli.program import quoted, stage_command
from mtptrain.cli.tables import wide_console
from mtptrain.config import PipelineConfig
from mtptrain.decoding.prompts import check_head_context
from mtptrain.decoding.round_costs import LoopBench, Spent
from mtptrain.engines.table import format_for, running_engine
from mtptrain.heads.base import Head
from mtptrain.heads.files import TARGET_WEIGHTS, build_trainable_head, save_head
from mtptrain.planning.break_even import (
    OWN_LOOP,
    PROMPT_LOOKUP_LENGTHS,
    RoundCost,
    default_choices,
    subject,
    usual_length,
    verdicts,
)
from mtptrain.run import Run
from mtptrain.stage_dir import StageDir
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256, write_sealed
from mtptrain.utils.startup import command

from ..engines import served_by
from ..plots import drawing, plot_break_even
from .bench import Bench, Row, drafting_choices, measure, scratch_dir

NEW_TOKENS = 33
"""Tokens of an answer. The first one comes from the prompt; the others take at most 32 rounds, which are timed."""


def measure_break_even(config: PipelineConfig, output_dir: Path) -> None:
    """Measure, print and write the costs of rounds in our loop, then in the engine."""
    # 1. Check everything before any long work.
    config = with_fixed_settings(config)
    run = Run(config)
    target = run.target
    head = random_head(config, target.config)
    prompts = random_prompts(config, target.config, head)
    program = engine_program(run)
    # 2. Our own loop. Its target is freed before an engine needs the memory.
    costs = loop_costs(config, target, head, prompts)
    gc.collect()
    torch.cuda.empty_cache()  # gives back what nothing holds any more: the target and its caches, and the head's copy
    StageDir(output_dir).record(config, "report.json")
    write_report(config, target, output_dir, costs)
    # 3. The engine.
    if isinstance(program, Path):
        costs += engine_costs(run, output_dir, head, prompts, program)
        write_report(config, target, output_dir, costs)
    warn_of_impossible(costs)
    print_table(costs, config.head.name)
    print(*verdicts(costs, config.head.name), sep="\n")
    print(
        "prompt lookup, which needs no training, usually gives {} to {} tokens per step".format(*PROMPT_LOOKUP_LENGTHS)
    )
    if not isinstance(program, Path):
        print(f"{config.serving.engine} was not measured: {program}")
    with drawing(output_dir / "plot.svg", output_dir / "report.json"):
        (output_dir / "plot.svg").write_text(plot_break_even(costs, config.head.name))


def with_fixed_settings(config: PipelineConfig) -> PipelineConfig:
    """Returns the config with the values of K to measure, and with answers of one length in both loop and engine."""
    choices = config.serving_bench.num_speculative_tokens or default_choices(config.head)
    return replace(
        config,
        serving_bench=replace(config.serving_bench, num_speculative_tokens=choices, ignore_eos=True),
        acceptance=replace(config.acceptance, max_new_tokens=NEW_TOKENS),
    )


def random_head(config: PipelineConfig, target_config: PreTrainedConfig) -> Head:
    """Returns the recipe's head with random weights. A draft vocabulary consists of the target's first tokens.

    Raises:
        UserError: the head cannot be trained, or does not fit the target.
    """
    torch.manual_seed(config.seed)
    head = build_trainable_head(config.head, target_config)
    return head.to(getattr(torch, config.acceptance.dtype)).eval().requires_grad_(False)


def random_prompts(config: PipelineConfig, target_config: PreTrainedConfig, head: Head) -> list[list[int]]:
    """Returns as many prompts of random tokens as the largest batch has.

    Raises:
        UserError: a prompt, its answer and drafts do not fit the context of the target or of the head.
    """
    num_tokens = config.acceptance.prompt_tokens
    largest = max(config.serving_bench.num_speculative_tokens)
    most = target_config.max_position_embeddings - NEW_TOKENS - 2 * largest
    if num_tokens > most:
        raise UserError(
            f"acceptance.prompt_tokens: must be at most {most}, so that {NEW_TOKENS} new tokens and 2 x {largest} "
            f"drafts fit the target's context of {target_config.max_position_embeddings} tokens too, but is "
            f"{num_tokens}; lower it, or leave large values out of serving_bench.num_speculative_tokens"
        )
    shape = max(config.serving_bench.concurrency), num_tokens
    generator = torch.Generator().manual_seed(config.seed)
    prompts = torch.randint(target_config.vocab_size, shape, generator=generator).tolist()
    check_head_context(head, prompts, NEW_TOKENS, largest, "head.init_from")
    return prompts


def engine_program(run: Run) -> Path | UserError:
    """Returns the engine's program or Python, or the reason why the engine cannot be measured on this machine.

    Raises:
        UserError: a setting names a program or GGUF file that does not exist or is another one, or the engine cannot
            keep as many requests in flight as `serving_bench.concurrency` says.
    """
    config, serving = run.config, run.config.serving
    engine = running_engine(serving.engine)
    # A wrong file is a mistake to report; a file that no setting names only leaves the engine unmeasured.
    if run.target.gguf is not None:
        engine.check_target(run.target)
    try:
        engine.check_target(run.target)
        format_for(serving.engine, config.head, run.target.config, run.target.gguf)
    except UserError as error:
        return error
    try:
        program = engine.find_program(serving)
    except UserError as error:
        if getattr(serving, engine.program_setting) is not None:
            raise
        return error
    engine.check_bench(program, config.head.name, max(config.serving_bench.concurrency), config.acceptance.temperature)
    return program


def loop_costs(
    config: PipelineConfig, target_files: TargetFiles, head: Head, prompts: Sequence[Sequence[int]]
) -> list[RoundCost]:
    """Returns the cost of a round in our own loop for each batch size and K."""
    settings, bench = config.acceptance, config.serving_bench
    ranks = init_ranks(config.distributed_timeout_hours)
    target = load_target(target_files.directory, getattr(torch, settings.dtype), ranks.device)
    loop = LoopBench(target, head.to(target.device), bench.num_speculative_tokens, settings)
    costs: list[RoundCost] = []
    for batch_size in tqdm(bench.concurrency, desc="our loop", unit="batch size"):
        loop.warm_up(prompts[:batch_size])
        spent = loop.fastest(prompts[:batch_size], NEW_TOKENS, bench.repeats)
        costs += [loop_cost(batch_size, num_drafts, spent) for num_drafts in bench.num_speculative_tokens]
    head.cpu()
    return costs


def loop_cost(batch_size: int, num_drafts: int, spent: dict[int, Spent]) -> RoundCost:
    """Returns the cost of a round with K drafts from what decoding took, by K; 0 is plain decoding."""
    own = spent[num_drafts]
    draft_ms, verify_ms = (own.phases[name] / own.rounds * 1e3 for name in ("draft", "verify"))
    plain_ms, round_ms = spent[0].seconds_per_round * 1e3, own.seconds_per_round * 1e3
    return RoundCost(OWN_LOOP, batch_size, num_drafts, plain_ms, round_ms, draft_ms, verify_ms)


def engine_costs(run: Run, output_dir: Path, head: Head, prompts: list[list[int]], program: Path) -> list[RoundCost]:
    """Returns the cost of a round in the engine, which serves the random head as `mtptrain export` writes it."""
    config = run.config
    with scratch_dir(output_dir) as scratch:
        head_dir, head_sha256 = export_random_head(run, head, scratch)
        served = served_by(run, program, head_dir, head_sha256, prompts, max(drafting_choices(config)), output_dir)
        rows, _ = measure(Bench(config, prompts, output_dir, served), scratch)
    return costs_of_rows(str(config.serving.engine), rows)


def export_random_head(run: Run, head: Head, run_dir: Path) -> tuple[Path, str]:
    """Store the head as if a run had trained it, and export it. Returns the export and the hash of the weights.

    Raises:
        UserError: the export failed.
    """
    trained, head_dir, engine = run_dir / "train/last", run_dir / "export", run.config.serving.engine
    save_head(trained, head.state_dict(), run.config.head, {TARGET_WEIGHTS: run.target.weights_sha256})
    settings = f"run_dir={quoted(run_dir)}", f"export.engine={engine}", f"export.output_dir={quoted(head_dir)}"
    arguments = stage_command("export", [*sys.argv[1:], *settings])
    result = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"mtptrain export: must export a head with random weights, but failed:\n{result.stderr}")
    return head_dir, file_sha256(trained / "head.safetensors")


def costs_of_rows(engine: str, rows: Sequence[Row]) -> list[RoundCost]:
    """Returns the cost of a round from the measured rows of an engine, those of K = 0 included."""
    step_ms = {(row.concurrency, row.num_speculative_tokens): row.step_ms for row in rows}
    return [
        RoundCost(engine, size, num_drafts, step_ms[size, 0], milliseconds, None, None)
        for (size, num_drafts), milliseconds in sorted(step_ms.items())
        if num_drafts
    ]


def warn_of_impossible(costs: Sequence[RoundCost]) -> None:
    """Warn if a round took less time than a plain step, which only other programs on the machine can explain."""
    for cost in costs:
        if cost.break_even_length < 1:
            warnings.warn(
                "serving_bench.break_even: a round must take at least as long as a plain step, but with "
                f"{cost.engine}, batch {cost.batch_size} and K = {cost.num_speculative_tokens} takes "
                f"{cost.round_ms:.2f} ms instead of {cost.plain_ms:.2f} ms; other programs disturb the measurement: "
                "repeat it when the machine is idle, or raise serving_bench.repeats",
                stacklevel=2,
            )


def write_report(config: PipelineConfig, target: TargetFiles, output_dir: Path, costs: Sequence[RoundCost]) -> None:
    settings = config.acceptance
    report = {
        "command": command(),
        "date": date.today().isoformat(),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
        "target": config.target.path,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": NEW_TOKENS,
        "repeats": config.serving_bench.repeats,
        "temperature": settings.temperature,
        "subject": subject(config, target),
        "rows": [cost.describe(config.head.name) for cost in costs],
    }
    write_sealed(output_dir / "report.json", report)


def print_table(costs: Sequence[RoundCost], head_name: str) -> None:
    table = Table(
        title=f"Does head {head_name} pay here?",
        caption="break-even: tokens per round above which drafting is faster; rate: share of drafts accepted then",
    )
    for column in (
        "engine",
        "batch",
        "K",
        "plain ms",
        "draft ms",
        "verify ms",
        "round ms",
        "break-even",
        "rate",
        "usual",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    for cost, following in zip(costs, [*costs[1:], None], strict=True):
        usual = usual_length(head_name, cost.num_speculative_tokens)
        times = (cost.plain_ms, cost.draft_ms, cost.verify_ms, cost.round_ms, cost.break_even_length)
        table.add_row(
            *(cost.engine, str(cost.batch_size), str(cost.num_speculative_tokens)),
            *("" if each is None else f"{each:.2f}" for each in times),
            f"{cost.break_even_rate:.0%}" if cost.can_pay else "never",
            "" if usual is None else "{:.1f} to {:.1f}".format(*usual),
            end_section=following is None or following.batch_size != cost.batch_size,
        )
    wide_console(100).print(table)
