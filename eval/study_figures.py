"""The figures of a study: a table over seeds, and a plot."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
"""Of one training run: `acceptance` by tokens of the prompt, `without_loops` likewise, and `acceptance_rate_at` of all."""
Measured = Mapping[str, Mapping[int, Figures | None]]
"""By variant and seed; None where the training diverged."""


def over_seeds(runs: Mapping[int, Figures | None], key: str, place: str | int) -> list[float]:
    """A figure of each seed that has it."""
    found = []
    for run in runs.values():
        if run is not None and (isinstance(place, str) or place < len(run[key])) and run[key][place] is not None:
            found.append(run[key][place])
    return found


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f}" + (f" ± {spread(values):.3f}" if len(values) > 1 else "")


def num_depths(measured: Measured) -> int:
    return max((len(run["acceptance_rate_at"]) for runs in measured.values() for run in runs.values() if run), default=0)


def lengths_table(prompt_tokens: Sequence[int], measured: Measured, key: str = "acceptance") -> list[list[str]]:
    """Acceptance length of each variant at each length of the prompt, below a row of names."""
    rows = [["prompts of", *(f"{each} tokens" for each in prompt_tokens), "trained"]]
    for variant, runs in measured.items():
        diverged = sum(run is None for run in runs.values())
        cells = [shown(over_seeds(runs, key, str(each))) for each in prompt_tokens]
        rows.append([variant, *cells, f"{len(runs)} seeds" + (f", {diverged} diverged" if diverged else "")])
    return rows


def positions_table(measured: Measured) -> list[list[str]]:
    """Share accepted at each position, of prompts of all lengths, below a row of names."""
    depths = range(num_depths(measured))
    rows = [["accepted", *(f"at {depth}" for depth in depths)]]
    return rows + [
        [variant, *(shown(over_seeds(runs, "acceptance_rate_at", depth)) for depth in depths)] for variant, runs in measured.items()
    ]


def print_tables(name: str, prompt_tokens: Sequence[int], measured: Measured) -> None:
    console = Console()
    console.width = max(console.width, 40 + 16 * len(prompt_tokens))
    for title, (names, *rows) in {
        "acceptance length": lengths_table(prompt_tokens, measured),
        "acceptance length without loops": lengths_table(prompt_tokens, measured, "without_loops"),
        "by position": positions_table(measured),
    }.items():
        table = Table(*names, title=f"{name}: {title}")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def draw(prompt_tokens: Sequence[int], measured: Measured, path: Path) -> None:
    """Acceptance length against tokens of the prompt, and acceptance by position; bars are standard deviations over seeds."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_tokens, by_position = figure.subplots(1, 2)
    depths = range(num_depths(measured))
    for variant, runs in measured.items():
        lengths = {each: over_seeds(runs, "acceptance", str(each)) for each in prompt_tokens}
        rates = {depth: over_seeds(runs, "acceptance_rate_at", depth) for depth in depths}
        for axes, points in ((by_tokens, lengths), (by_position, rates)):
            values = {place: each for place, each in points.items() if each}
            means, deviations = [statistics.mean(each) for each in values.values()], [spread(each) for each in values.values()]
            axes.errorbar(list(values), means, yerr=deviations, marker="o", capsize=3, label=variant)
    by_tokens.set_xscale("log", base=2)
    by_tokens.set_xticks(prompt_tokens, list(map(str, prompt_tokens)))
    by_tokens.set(xlabel="tokens of the prompt", ylabel="acceptance length")
    by_position.set_xticks(depths)
    by_position.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, None))
    by_tokens.legend(fontsize=8)
    figure.savefig(path, format="svg")
