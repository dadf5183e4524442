"""Prints tables of a study's results, and draws a plot, with means and standard deviations over seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.speculate import Generation
from mtptrain.utils.files import read_sealed

RunResult = dict[str, Any]
"""One run's figures.

`acceptance` and `without_loops` are acceptance lengths by prompt length. `acceptance_rate_at` has the head's acceptance
rate at each position in the draft, over prompts of all lengths. `length_of`, `tokens_per_step_of` and
`tokens_per_s_of` are keyed by drafter: `head`, the baselines, and the head at other temperatures.
"""
StudyResults = Mapping[str, Mapping[int, RunResult | None]]
"""Results by variant and seed; None if the training diverged."""


def result_of(output_dir: Path, prompt_tokens: Sequence[int]) -> RunResult:
    """Returns a run's result, read from the folder that `mtptrain acceptance` wrote.

    An acceptance length is None if no round had drafts.
    """
    lines = [json.loads(line) for line in (output_dir / "generations.jsonl").read_text().splitlines()]
    names = ("tokens", "rounds", "empty_rounds", "drafted", "accepted_at")
    answers = [
        (int(line["id"].split()[1]), line["has_loop"], Generation(**{name: line[name] for name in names}))
        for line in lines
    ]

    def lengths(with_loops: bool) -> dict[str, float | None]:
        length_of = {}
        for tokens in prompt_tokens:
            pooled = summarise(
                [each for length, loops, each in answers if length == tokens and (with_loops or not loops)]
            )
            length_of[str(tokens)] = pooled.acceptance_length if pooled.rounds else None
        return length_of

    return {
        "acceptance": lengths(with_loops=True),
        "without_loops": lengths(with_loops=False),
        "acceptance_rate_at": summarise([each for *_, each in answers]).acceptance_rate_at,
        **drafter_figures(read_sealed(output_dir / "report.json", "set another study.name")),
    }


def drafter_figures(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the acceptance length and speed of every drafter in a report of `mtptrain acceptance`."""
    drafters = {"head": report, **report["baselines"]}
    return {
        "length_of": {name: each["acceptance_length"] for name, each in drafters.items() if each["rounds"]},
        "tokens_per_step_of": {name: each["tokens_per_step"] for name, each in drafters.items()},
        "tokens_per_s_of": {name: each["tokens_per_s"] for name, each in report["speed"].items()},
    }


def over_seeds(runs: Mapping[int, RunResult | None], key: str, index: str | int) -> list[float]:
    """Returns `run[key][index]` for every seed whose run has it."""
    found = [run[key] for run in runs.values() if run is not None]
    # Lists have an entry per draft position.
    by_index: list[dict[Any, float | None]] = [
        dict(enumerate(each)) if isinstance(each, list) else each for each in found
    ]
    values = [each.get(index) for each in by_index]
    return [value for value in values if value is not None]


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation over seeds; 0 for a single seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f}" + (f" ± {spread(values):.3f}" if len(values) > 1 else "")


def num_depths(measured: StudyResults) -> int:
    return max(
        (len(run["acceptance_rate_at"]) for runs in measured.values() for run in runs.values() if run), default=0
    )


def lengths_table(prompt_tokens: Sequence[int], measured: StudyResults, key: str = "acceptance") -> list[list[str]]:
    """Returns a row of column names, then a row of acceptance lengths by prompt length for each variant."""
    rows = [["prompts of", *(f"{each} tokens" for each in prompt_tokens), "trained"]]
    for variant, runs in measured.items():
        diverged = sum(run is None for run in runs.values())
        cells = [shown(over_seeds(runs, key, str(each))) for each in prompt_tokens]
        rows.append([variant, *cells, f"{len(runs)} seeds" + (f", {diverged} diverged" if diverged else "")])
    return rows


def positions_table(measured: StudyResults) -> list[list[str]]:
    """Returns a row of column names, then a row of acceptance rates by position in the draft for each variant.

    The rates are over prompts of all lengths.
    """
    depths = range(num_depths(measured))
    rows = [["accepted", *(f"at {depth}" for depth in depths)]]
    return rows + [
        [variant, *(shown(over_seeds(runs, "acceptance_rate_at", depth)) for depth in depths)]
        for variant, runs in measured.items()
    ]


def drafters_table(measured: StudyResults) -> list[list[str]]:
    """Returns a row of column names, then a row for each variant's head, its baselines and its other temperatures."""
    rows = [["drafter", "length", "tokens per step", "tokens/s"]]
    for variant, runs in measured.items():
        for drafter in dict.fromkeys(name for run in runs.values() if run for name in run["tokens_per_s_of"]):
            cells = [
                shown(over_seeds(runs, key, drafter)) for key in ("length_of", "tokens_per_step_of", "tokens_per_s_of")
            ]
            rows.append([variant if drafter == "head" else f"{variant}, {drafter.replace('_', ' ')}", *cells])
    return rows


def print_tables(name: str, prompt_tokens: Sequence[int], measured: StudyResults) -> None:
    console = Console()
    console.width = max(console.width, 40 + 16 * len(prompt_tokens))
    for title, (names, *rows) in {
        "acceptance length": lengths_table(prompt_tokens, measured),
        "acceptance length without loops": lengths_table(prompt_tokens, measured, "without_loops"),
        "by position": positions_table(measured),
        "by drafter, prompts of all lengths": drafters_table(measured),
    }.items():
        table = Table(*names, title=f"{name}: {title}")
        for row in rows:
            table.add_row(*row)
        console.print(table)


@matplotlib.rc_context({"text.parse_math": False})  # a `$` in a name must not begin a formula
def draw(prompt_tokens: Sequence[int], measured: StudyResults, path: Path) -> None:
    """Plot acceptance length by prompt length, and acceptance rate by position in the draft.

    Error bars are standard deviations over seeds.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_tokens, by_position = figure.subplots(1, 2)
    depths = range(num_depths(measured))
    for variant, runs in measured.items():
        lengths = {each: over_seeds(runs, "acceptance", str(each)) for each in prompt_tokens}
        rates = {depth: over_seeds(runs, "acceptance_rate_at", depth) for depth in depths}
        for axes, points in ((by_tokens, lengths), (by_position, rates)):
            values = {x: each for x, each in points.items() if each}
            means, deviations = (
                [statistics.mean(each) for each in values.values()],
                [spread(each) for each in values.values()],
            )
            axes.errorbar(list(values), means, yerr=deviations, marker="o", capsize=3, label=variant)
    by_tokens.set_xscale("log", base=2)
    by_tokens.set_xticks(prompt_tokens, list(map(str, prompt_tokens)))
    by_tokens.set(xlabel="prompt tokens", ylabel="acceptance length")
    by_position.set_xticks(depths)
    by_position.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, None))
    by_tokens.legend(fontsize=8)
    figure.savefig(path, format="svg")
