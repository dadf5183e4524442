"""Renders reports of `mtptrain acceptance` as one self-contained HTML page with plots, from `report.html.jinja`."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from mtptrain.config import PipelineConfig
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_sealed, refuse_overwriting, write_text

from .plots import colours_of, drawing, plots_of

ReportFigures = Mapping[str, Any]
"""A whole `report.json`, or the figures of one drafter in it."""

MEASURED_WITH = (
    "num_speculative_tokens",
    "temperature",
    "top_p",
    "top_k",
    "sample_drafts",
    "max_new_tokens",
    "dtype",
    "batch_size",
    "batch_tokens",
    "seed",
)
"""Settings of `acceptance` that a report repeats under their own names."""
SETTINGS = (
    *("target", "head", *MEASURED_WITH),
    *("device", "prompts_file", "conversations", "cut_conversations", "sources"),
)
"""Entries of a report that the page shows as settings."""
SAME_MEASUREMENT = ("head_sha256", "prompts_sha256", "num_speculative_tokens", "max_new_tokens", "dtype")
TITLE = "<title>Acceptance of "
"""How the title of every page begins."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TemplateError, TypeError, ValueError)
"""Errors that an incomplete report, or a file that is not a report, may raise."""
REPEAT = "repeat this measurement"


@dataclass(frozen=True)
class Section:
    """A section that follows the plots and examples on the page: a table, and perhaps a plot."""

    title: str
    command: str = ""
    """The command that measured the figures; empty if it is that of the report."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    legend: str = ""
    error: str = ""
    """Why there is nothing to show."""


def write_run_page(config: PipelineConfig) -> None:
    """Write `report.html` for the `report.json` of `mtptrain acceptance`, if there is one.

    The page also shows what other programs have measured in the same run: an engine's counters and decoding speed.
    """
    directory = config.acceptance_dir
    path = directory / "report.json"
    try:
        report = read_sealed(path, "run mtptrain acceptance again") if path.exists() else {}
    except UserError as error:  # other programs have measured something, which a damaged report must not end
        warnings.warn(f"{directory / 'report.html'} is not written: {error}", stacklevel=2)
        return
    if "speed" not in report:  # missing, or an older format
        return
    page = directory / "report.html"
    with drawing(page, path):
        refuse_overwriting(page, page.name, (TITLE,), "move it away, or set acceptance.output_dir")
        write_text(page, render_page({str(directory): report}, sections_of(config, report)))


def sections_of(config: PipelineConfig, report: ReportFigures) -> list[Section]:
    """Returns sections with the head's losses by depth, and with what other programs have measured in the same run."""
    losses = held_out_section(report)
    sections = [] if losses is None else [losses]
    builders = {
        Path(config.serving.output_dir or config.stage_dir("serving_check")) / "report.json": served_section,
    }
    for path, build in builders.items():
        try:
            section = build(path, report) if path.exists() else None
        except UNREADABLE as error:
            section = Section(path.parent.name, error=f"{path} cannot be shown ({error!r}); {REPEAT}")
        sections += [] if section is None else [section]
    return sections


def held_out_section(report: ReportFigures) -> Section | None:
    """Returns a section with the head's losses by depth; None if they were not computed."""
    losses = report.get("held_out")
    if losses is None:
        return None
    names = ("kl_at", "top1_accuracy_at", "overlap_at")
    rows = [
        [str(depth), *(f"{losses[name][depth]:.3f}" for name in names), f"{count:,}"]
        for depth, count in enumerate(losses["num_drafts_at"])
    ]
    legend = (
        "Computed on the target's answers to these prompts with teacher forcing: the head reads their tokens, "
        "never its own drafts. Top-1 accuracy: share of drafts that are the target's most likely token. Overlap: "
        "probability that a sampled draft is accepted."
    )
    columns = ("depth", "KL, nats", "top-1 accuracy", "overlap", "drafts")
    return Section("Losses of the head by depth", columns=columns, rows=rows, legend=legend)


def served_section(path: Path, report: ReportFigures) -> Section | None:
    """Returns a section with the results of `mtptrain serving-check`; None if it does not match the report.

    A report of sampling never matches, because the check decodes greedily.
    """
    served = read_sealed(path, REPEAT)
    if report["temperature"] > 0 or any(served.get(name, "") != report.get(name) for name in SAME_MEASUREMENT):
        return None
    depths = range(served["num_speculative_tokens"])
    columns = ["", "rounds", "drafted tokens", *(f"accepted at {depth}" for depth in depths), "acceptance length"]
    rows = []
    for name, each in (("ours", served["ours"]), (f"{served['engine']} {served['version']}", served["theirs"])):
        counts = ["" if n is None else f"{n:,}" for n in (each["rounds"], each["drafted"], *each["accepted_at"])]
        rows.append([name, *counts, f"{each['acceptance_length']:.3f}", str(each["plain_greedy_answers"])])
    return Section(
        "Served by an engine, position by position",
        served.get("command", ""),
        [*columns, f"answers equal to plain greedy decoding (of {served['prompts']})"],
        rows,
    )


def render_page(reports: Mapping[str, ReportFigures], sections: Sequence[Section] = ()) -> str:
    """Returns the HTML page.

    Args:
        reports: the report of each run, by display name. The page compares the heads and baselines of all runs.
        sections: shown after the plots and examples.
    """
    drafters = drafters_of(reports)
    first = next(iter(reports.values()))
    settings = {
        name: first[name]
        for name in SETTINGS
        if name in first and all(each.get(name) == first[name] for each in reports.values())
    }
    has_speed = has_comparable_speeds(reports)
    num_depths = max(len(each["acceptance_rate_at"]) for each in drafters.values())
    colours = colours_of(drafters)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=f"Acceptance of head {first['head_name']}" if len(reports) == 1 else f"Acceptance of {len(reports)} runs",
        length=f"{first['acceptance_length']:.2f}" if len(reports) == 1 else "",
        interval=(
            f"95 % {length_interval(first)}"
            if first["intervals"]
            else "without an interval: all prompts are from one source"
        ),
        verdict=verdict(drafters, has_speed),
        examples=first.get("examples", []) if len(reports) == 1 else [],
        commands=[each["command"] for each in reports.values() if "command" in each],
        settings=settings,
        columns=["", "length", *cell_columns(num_depths)],
        rows=[
            {"name": name, "colour": colours[name], **table_row(each, num_depths, has_speed)}
            for name, each in drafters.items()
        ],
        sections=sections,
        plots=plots_of(drafters),
    )


def verdict(drafters: Mapping[str, ReportFigures], has_speed: bool) -> list[str]:
    """Returns sentences that say which drafter is best, whether that is certain, and what it gains in tokens/s."""
    drafting = {name: each for name, each in drafters.items() if each["drafted"]}
    if not drafting:
        return ["No drafter proposed a token."]
    best, *others = sorted(drafting, key=lambda name: -drafting[name]["tokens_per_step"])
    sentence = f"Each step of the target gives {drafting[best]['tokens_per_step']:.2f} tokens with {best}"
    if others:
        second = drafting[others[0]]
        sentence += f" and {second['tokens_per_step']:.2f} with {others[0]}, the next best"
        intervals = [each["intervals"] and each["intervals"]["tokens_per_step"] for each in (drafting[best], second)]
        if all(intervals):
            are_apart = intervals[0][0] > intervals[1][1]
            sentence += f"; their 95 % intervals {'do not overlap' if are_apart else 'overlap'}"
    sentences = [sentence + "."]
    of_run = [each for each in drafters.values() if each["run"] == drafting[best]["run"]]
    plain = next((each for each in of_run if each["drafter"] == "none"), None)
    if plain is not None and has_speed:
        gain = drafting[best]["tokens_per_s"] / plain["tokens_per_s"]
        sentences.append(f"With {best}, decoding was {gain:.2f} times as fast as without drafts in this measurement.")
    fastest = max(drafting, key=lambda name: drafting[name]["tokens_per_s"])
    if fastest != best and has_speed:
        speeds = [f"{drafting[name]['tokens_per_s']:,.0f} tokens/s" for name in (fastest, best)]
        sentences.append(f"The fastest was {fastest}, at {speeds[0]}; {best} gave {speeds[1]}.")
    return sentences


def cell_columns(num_depths: int) -> list[str]:
    """Returns the headings of the cells of `table_row`."""
    return ["no loops", "per step", *(f"at {depth}" for depth in range(num_depths)), "prompts", "tokens/s"]


def table_row(figures: ReportFigures, num_depths: int, has_speed: bool) -> dict[str, Any]:
    rates = [f"{rate:.3f}" for rate in figures["acceptance_rate_at"]]
    return {
        "length": f"{figures['acceptance_length']:.3f}",
        "interval": length_interval(figures),
        "cells": [
            f"{figures['without_loops']['acceptance_length']:.3f}",
            f"{figures['tokens_per_step']:.3f}",
            *rates,
            *[""] * (num_depths - len(rates)),
            str(figures["prompts"]),
            f"{figures['tokens_per_s']:,.0f}" if has_speed else "",
        ],
    }


def drafters_of(reports: Mapping[str, ReportFigures]) -> dict[str, ReportFigures]:
    """Returns the figures and the speed of every head and baseline in the reports, by display name.

    `run` says of which report they are, and `drafter` which of its drafters: "head", or the name of a baseline.
    """
    drafters: dict[str, ReportFigures] = {}
    for name, report in reports.items():
        prefix = f"{name}: " if len(reports) > 1 else ""
        for drafter, figures in {"head": report, **report["baselines"]}.items():
            label = {"head": f"head {report['head_name']}", "none": "no drafts"}.get(drafter, drafter.replace("_", " "))
            setting = f" ({report[drafter]})" if drafter in ("tree", "hybrid", "model") else ""
            of_run = {"run": name, "drafter": drafter}
            drafters[prefix + label + setting] = {**figures, **report["speed"][drafter], **of_run}
    return drafters


def has_comparable_speeds(reports: Mapping[str, ReportFigures]) -> bool:
    """Returns whether the tokens/s of the reports can be compared: whether batches, ranks and device are the same."""
    facts = {
        (each["batch_size"], each.get("batch_tokens"), each["num_ranks"], each["device"]) for each in reports.values()
    }
    return len(facts) == 1


def length_interval(figures: ReportFigures) -> str:
    """Returns the interval of an acceptance length, or why there is none."""
    if figures["intervals"] is None:
        return "one source"
    low, high = figures["intervals"]["acceptance_length"]
    return f"{low:.2f}-{high:.2f}"
