"""Renders reports of `mtptrain acceptance` as one self-contained HTML page with plots, from `report.html.jinja`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mtptrain.engines.verdict import best_rows, gains
from mtptrain.utils.figures import shown
from mtptrain.utils.files import refuse_overwriting, write_text

from .plots import colours_of, drawing, plots_of

ReportFigures = Mapping[str, Any]
"""A whole `report.json`, or the figures of one drafter in it."""

MEASURED_WITH = (
    *("num_speculative_tokens", "temperature", "top_p", "top_k", "sample_drafts", "max_new_tokens"),
    *("dtype", "batch_size", "batch_tokens", "seed"),
)
"""Settings of `acceptance` that a report repeats under their own names."""
SETTINGS = (
    *("target", "head", *MEASURED_WITH),
    *("device", "prompts_file", "conversations", "cut_conversations", "sources"),
)
"""Entries of a report that the page shows as settings."""
TITLE = "<title>Acceptance of "
"""How the title of every page begins."""


def write_page(report: ReportFigures, directory: Path, bench: ReportFigures | None = None) -> None:
    """Write the page of a report, with what mtptrain serving-bench measured of the same head, if it has."""
    page = directory / "report.html"
    with drawing(page, directory / "report.json"):
        refuse_overwriting(page, page.name, (TITLE,), "move it away, or set acceptance.output_dir")
        write_text(page, render_page({str(directory): report}, bench))


def render_page(reports: Mapping[str, ReportFigures], bench: ReportFigures | None = None) -> str:
    """Returns the HTML page, which compares the heads and baselines of all runs, whose reports are by display name."""
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
        length=shown(first["acceptance_length"], 2) if len(reports) == 1 else "",
        interval=(
            f"95 % {length_interval(first)}"
            if first["intervals"] and first["intervals"]["acceptance_length"]
            else "without an interval: all prompts are from one source, or have the same figure"
        ),
        verdict=verdict(drafters, has_speed) + ([f"{gains(bench)}."] if bench else []),
        served=served_table(bench) if bench else [],
        examples=first.get("examples", []) if len(reports) == 1 else [],
        commands=[each["command"] for each in reports.values() if "command" in each],
        settings=settings,
        columns=["", "length", *cell_columns(num_depths)],
        rows=[
            {"name": name, "colour": colours[name], **table_row(each, num_depths, has_speed)}
            for name, each in drafters.items()
        ],
        shown=shown,
        held_out=first.get("held_out") if len(reports) == 1 else None,
        plots=plots_of(drafters),
    )


def served_table(bench: ReportFigures) -> list[list[str]]:
    """Returns the heading and the rows of the engine's tokens/s, without drafts and with the fastest K."""
    plain = {row["concurrency"]: row for row in bench["rows"] if row["num_speculative_tokens"] == 0}
    rows = [["requests in flight", "tokens/s without drafts", "with the head", "K", "speed-up"]]
    for number, best in sorted(best_rows(bench).items()):
        speeds = [f"{row['output_tokens_per_s']:,.0f}" for row in (plain[number], best)]
        rows.append([str(number), *speeds, str(best["num_speculative_tokens"]), shown(best["speed_up"], 2)])
    return rows


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
    return sentences


def cell_columns(num_depths: int) -> list[str]:
    """Returns the headings of the cells of `table_row`."""
    return ["no loops", "per step", *(f"at {depth}" for depth in range(num_depths)), "prompts", "tokens/s"]


def table_row(figures: ReportFigures, num_depths: int, has_speed: bool) -> dict[str, Any]:
    rates = [shown(rate) for rate in figures["acceptance_rate_at"]]
    return {
        "length": shown(figures["acceptance_length"]),
        "interval": length_interval(figures),
        "cells": [
            shown(figures["without_loops"]["acceptance_length"]),
            shown(figures["tokens_per_step"]),
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
    interval = figures["intervals"]["acceptance_length"]
    if interval is None:
        return "" if figures["acceptance_length"] is None else "no spread"
    return f"{interval[0]:.2f}-{interval[1]:.2f}"
