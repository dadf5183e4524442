"""Draws the plots of all reports as SVG. A failure is a warning, because the measurement is already on disk."""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtptrain.utils.errors import warn

Drafters = Mapping[str, Mapping[str, Any]]
"""The figures of each drafter, by its display name."""


COLOURS = ("#2a6fbb", "#d9822b", "#4a9d5b", "#b0413e", "#7b5ea7", "#8c6d4f", "#c76aa8", "#6b7280", "#a3a13a", "#2b9aa8")


@contextmanager
def drawing(path: Path, figures: Path) -> Iterator[None]:
    """Prints the path of a page or plot once the block has drawn it, or warns that only `figures` has the numbers."""
    try:
        yield
    except Exception as error:  # matplotlib and jinja2 may raise anything, but the measurement has succeeded
        reason = str(error).strip().partition("\n")[0]
        warn(
            f"{path}: must show the figures of {figures}, but cannot be drawn ({type(error).__name__}: {reason}); read "
            "them in that JSON file, which is complete"
        )
    else:
        print(f"plots: {path}")


def as_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def colours_of(drafters: Drafters) -> dict[str, str]:
    """Returns the colour of each drafter, the same in the table and in every plot."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(drafters)}


def plots_of(drafters: Drafters) -> dict[str, str]:
    """Returns the plots that have more than one point, by title."""
    plots: dict[str, Callable[[Axes, Drafters], bool]] = {
        "Share of rounds that accept the draft at each position, with 95 % intervals": plot_positions,
        "Acceptance length by prompt length": lambda axes, each: plot_groups(axes, each, "by_prompt_tokens", "from"),
        "Acceptance length by category": lambda axes, each: plot_groups(axes, each, "by_category", ""),
    }
    drawn = {title: draw(plot, drafters) for title, plot in plots.items()}
    return {title: svg for title, svg in drawn.items() if svg}


@matplotlib.rc_context({"text.parse_math": False})  # a `$` in a name does not begin a formula
def draw(plot: Callable[[Axes, Drafters], bool], drafters: Drafters) -> str:
    """Returns a plot as SVG, or an empty string if it has one point at most."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    has_content = plot(figure.subplots(), drafters)
    return as_svg(figure) if has_content else ""


def put_legend(axes: Axes) -> None:
    """Place the legend below the plot, which keeps its height, if it has more than one entry."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        ncols = 2 if max(map(len, labels)) <= 40 else 1
        axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=ncols, frameon=False)
        if figure := axes.get_figure(root=True):
            figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / ncols))


def plot_positions(axes: Axes, drafters: Drafters) -> bool:
    for name, each in drafters.items():
        rates = each["acceptance_rate_at"]
        if each["drafted"]:
            positions = range(len(rates))
            colour = colours_of(drafters)[name]
            axes.plot(positions, rates, marker="o", label=name, color=colour)
            if each["intervals"] is not None:
                bounds = zip(each["intervals"]["acceptance_rate_at"], rates, strict=True)
                low, high = zip(*(interval or (rate, rate) for interval, rate in bounds), strict=True)
                axes.fill_between(positions, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.set_xticks(positions)
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1))
    put_legend(axes)
    return any(len(each["acceptance_rate_at"]) > 1 for each in drafters.values() if each["drafted"])


def plot_groups(axes: Axes, drafters: Drafters, key: str, prefix: str) -> bool:
    groups = list(dict.fromkeys(name for each in drafters.values() for name in each[key]))
    drafting = {name: each for name, each in drafters.items() if each["drafted"]}
    width = 0.8 / max(len(drafting), 1)
    for index, (name, each) in enumerate(drafting.items()):
        lengths = {i: each[key].get(group, {}).get("acceptance_length") for i, group in enumerate(groups)}
        drawn = {i + (index - (len(drafting) - 1) / 2) * width: length for i, length in lengths.items() if length}
        axes.bar([*drawn], [*drawn.values()], width * 0.92, label=name, color=colours_of(drafters)[name])
    counts = {
        group: max(each[key][group]["prompts"] for each in drafters.values() if group in each[key]) for group in groups
    }
    axes.set_xticks(
        range(len(groups)), [f"{prefix} {group}\n{counts[group]} prompts".strip() for group in groups], fontsize=9
    )
    axes.set(ylabel="acceptance length", ylim=(1, None))
    put_legend(axes)
    return len(groups) > 1


def plot_serving(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG of output tokens/s by requests in flight and by the tokens/s of each user, with a line per K."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_load, by_user = figure.subplots(1, 2)
    for index, depth in enumerate(dict.fromkeys(row["num_speculative_tokens"] for row in rows)):
        own = [row for row in rows if row["num_speculative_tokens"] == depth]
        name = "running server" if depth is None else f"K = {depth}" if depth else "no drafts"
        style: dict[str, Any] = {"marker": "o", "label": name, "color": COLOURS[index % 10]}
        speeds = [row["output_tokens_per_s"] for row in own]
        users = [1000 / row["tpot_ms"]["p50"] if row["tpot_ms"]["p50"] else 0.0 for row in own]
        by_load.plot([row["concurrency"] for row in own], speeds, **style)
        by_user.plot(users, speeds, **style)
        for row, user, speed in zip(own, users, speeds, strict=True):
            by_user.annotate(str(row["concurrency"]), (user, speed), (4, 4), textcoords="offset points", fontsize=8)
    ticks = sorted({row["concurrency"] for row in rows})
    by_load.set_xscale("log", base=2)
    by_load.set_xticks(ticks, [str(tick) for tick in ticks])
    by_load.set(xlabel="requests in flight", ylabel="output tokens/s", ylim=(0, None))
    by_user.set(xlabel="tokens/s of one user (number: requests in flight)", ylim=(0, None), xlim=(0, None))
    put_legend(by_load)
    return as_svg(figure)
