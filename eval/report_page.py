"""Reports of `eval.acceptance` as one HTML page with plots that opens without a network."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtptrain.config import PipelineConfig
from mtptrain.decoding.speculate import PHASES

from .study_figures import lengths_table

Figures = Mapping[str, Any]
"""Of one drafter, as `report.json` holds them."""

SETTINGS = (
    "target",
    "head",
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
    "device",
    "prompts_file",
    "conversations",
    "cut_conversations",
    "sources",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; } dt { font-weight: 600; float: left; clear: left;
width: 16em; } pre { background: #f4f4f4; padding: .5em .8em; white-space: pre-wrap; } .ci { color: #777; font-size: 85%; }
"""


SAME_MEASUREMENT = ("head_sha256", "prompts_sha256", "num_speculative_tokens", "max_new_tokens", "dtype")
SAME_DECODING = (
    "head_sha256",
    "prompts_sha256",
    "device",
    "temperature",
    "top_p",
    "top_k",
    "sample_drafts",
    "max_new_tokens",
    "dtype",
)
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a report that is not whole, or is none, raises."""
DECODING_COLUMNS = {
    "prompts together": ("batch_size", "d"),
    "K": ("num_speculative_tokens", "d"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "speed-up": ("speed_up", ".2f"),
    "with prompt": ("speed_up_with_prompt", ".2f"),
    "predicted": ("predicted_speed_up", ".2f"),
    "refilled": ("refilled_speed_up", ".2f"),
    "tokens a round": ("tokens_per_round", ".2f"),
    "draft, ms": ("draft_ms", ".2f"),
    "verify, ms": ("verify_ms", ".2f"),
}


def write_run_page(config: PipelineConfig) -> None:
    """Write `report.html` for the `report.json` of `eval.acceptance`, if there is one, with what other programs measured in the same
    run: an engine's counters, speed, studies."""
    directory = Path(config.acceptance.output_dir or config.stage_dir("acceptance"))
    report = read_report(directory / "report.json")
    if "speed" not in report:  # none, or an older one
        return
    sections: list[str] = []
    places = {
        Path(config.serving.output_dir or config.stage_dir("serving_check")) / "report.json": served_section,
        config.stage_dir("bench_decode") / "report.json": decoding_section,
        **dict.fromkeys(sorted(config.stage_dir("study").glob("*/study.json")), study_section),
    }
    for path, section in places.items():
        try:
            sections += section(path, report) if path.exists() else []
        except UNREADABLE as error:  # what was measured now is worth more
            sections.append(f"<p>{escape(str(path))}: cannot be shown, {escape(repr(error))}; measure it again</p>")
    write_page(directory / "report.html", {str(directory): report}, sections)


def served_section(path: Path, report: Figures) -> list[str]:
    """Of `eval.serving_check`, if it is of the same measurement."""
    served = read_report(path)
    if report["temperature"] > 0 or any(served.get(name, "") != report.get(name) for name in SAME_MEASUREMENT):
        return []
    return ["<h2>Served by an engine, position by position</h2>", command_of(served), served_table(served)]


def decoding_section(path: Path, report: Figures) -> list[str]:
    """Of `eval.bench.decode`, if it is of the same head and settings."""
    decoding = read_report(path)
    if any(decoding.get(name, "") != report.get(name) for name in SAME_DECODING):
        return []
    legend = (
        "<p>Tokens/s behind the prompt; K = 0 is plain decoding. Predicted: from the acceptance of prompts of other files and what rounds "
        "of random tokens cost. Refilled: where other prompts take the places of those that are done, as in an engine.</p>"
    )
    rows = [[format(row[key], form) for key, form in DECODING_COLUMNS.values()] for row in decoding["rows"]]
    table = html_table([list(DECODING_COLUMNS), *rows])
    return ["<h2>Decoding beside plain decoding</h2>", command_of(decoding), table, legend, svg_in(path.with_suffix(".svg"))]


def study_section(path: Path, report: Figures) -> list[str]:
    """Of `eval.study`, which is of the recipe and not of its head."""
    study = read_report(path)
    table = html_table(lengths_table(study["study"]["prompt_tokens"], study["measured"]))
    title = f"<h2>Study: {escape(study['study']['name'])}, acceptance length by tokens of the prompt</h2>"
    return [title, command_of(study), table, svg_in(path.with_suffix(".svg"))]


def read_report(path: Path) -> dict[str, Any]:
    """A report; empty where there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_page(path: Path, reports: Mapping[str, Figures], sections: Sequence[str] = ()) -> None:
    """Write the page of `page_of`."""
    path.write_text(page_of(reports, sections), encoding="utf-8")


def page_of(reports: Mapping[str, Figures], sections: Sequence[str] = ()) -> str:
    """The page.

    Args:
        reports: of runs, by the name to show; with one, its drafters are shown beside each other, with several, their heads too.
        sections: HTML that stands behind the table.
    """
    drafters = drafters_of(reports)
    first = next(iter(reports.values()))
    settings = {
        name: first[name] for name in SETTINGS if name in first and all(each.get(name) == first[name] for each in reports.values())
    }
    plots = {
        "Share of rounds that accept the draft at each position, with intervals of 95 %": plot_positions,
        "Acceptance length by tokens of the prompt": lambda axes, each: plot_groups(axes, each, "by_prompt_tokens", "from"),
        "Acceptance length by category": lambda axes, each: plot_groups(axes, each, "by_category", ""),
        "Acceptance length of each prompt": plot_prompts,
        "Overlap of the head's and the target's distributions, and what is accepted, of rounds that get to a position": plot_overlap,
        "Calibration: is a draft accepted as often as the head believes?": plot_calibration,
    }
    if have_equal_speeds(reports):
        plots["What a new token costs"] = plot_costs
    parts = [f"<!doctype html><meta charset='utf-8'><title>Acceptance</title><style>{STYLE}</style><h1>Acceptance</h1>"]
    parts += [command_of(each) for each in reports.values()]
    parts.append(
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items()) + "</dl>"
    )
    parts.append(table_of(drafters, have_equal_speeds(reports)))
    parts.append(
        "<p>Length: 1 + accepted / rounds, over rounds with drafts. Per step: tokens for each forward of the target, rounds without drafts "
        "included. At i: rounds that accepted the draft at position i, over rounds. No loops: without outputs in which a block repeats "
        "itself, where drafting is easy. Tokens/s: in batches as above, the time of the prompts included.</p>"
    )
    parts += sections
    for title, plot in plots.items():
        svg = figure(plot, drafters)
        parts += [f"<h2>{escape(title)}</h2>", svg] if svg else []
    return "\n".join(parts) + "\n"


def drafters_of(reports: Mapping[str, Figures]) -> dict[str, Figures]:
    """Every drafter of every report with its speed, by the name to show."""
    found: dict[str, Figures] = {}
    for name, each in reports.items():
        prefix = f"{name}: " if len(reports) > 1 else ""
        for drafter, figures in {"head": each, **each["baselines"]}.items():
            shown = f"head {each['head_name']}" if drafter == "head" else drafter.replace("_", " ")
            setting = f" ({each[drafter]})" if drafter in ("tree", "hybrid", "model") else ""
            found[prefix + shown + setting] = {**figures, **each["speed"][drafter]}
    return found


def have_equal_speeds(reports: Mapping[str, Figures]) -> bool:
    """Whether tokens/s of all reports can stand beside each other."""
    return (
        len({(each["batch_size"], each.get("batch_tokens"), each["num_ranks"], each["device"]) for each in reports.values()}) == 1
    )


def table_of(drafters: Mapping[str, Figures], with_speed: bool) -> str:
    depths = range(max(len(each["acceptance_rate_at"]) for each in drafters.values()))
    names = ["", "length", "no loops", "per step", *(f"at {depth}" for depth in depths), "prompts", "tokens/s"]
    rows = [names]
    for name, each in drafters.items():
        rates = [f"{rate:.3f}" for rate in each["acceptance_rate_at"]] + [""] * (len(depths) - len(each["acceptance_rate_at"]))
        cells = [
            f"{each['acceptance_length']:.3f} <span class='ci'>{length_interval(each)}</span>",
            f"{each['without_loops']['acceptance_length']:.3f}",
            f"{each['tokens_per_step']:.3f}",
            *rates,
            str(each["prompts"]),
            f"{each['tokens_per_s']:,.0f}" if with_speed else "",
        ]
        rows.append([escape(name), *cells])
    return html_table(rows)


def length_interval(figures: Figures) -> str:
    """The interval of an acceptance length, or why there is none."""
    if figures["intervals"] is None:
        return "one source"
    low, high = figures["intervals"]["acceptance_length"]
    return f"{low:.2f}-{high:.2f}"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Of cells in HTML, the names of the columns first."""
    names, *others = rows
    lines = ["".join(f"<th>{cell}</th>" for cell in names), *("".join(f"<td>{cell}</td>" for cell in row) for row in others)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def command_of(figures: Figures) -> str:
    return f"<pre>{escape(figures['command'])}</pre>" if "command" in figures else ""


def svg_in(path: Path) -> str:
    svg = path.read_text() if path.exists() else ""
    return svg[svg.find("<svg") :] if svg else ""


def served_table(served: Figures) -> str:
    """The engine's counters beside ours."""
    depths = range(served["num_speculative_tokens"])
    names = ["", "drafts", "drafted tokens", *(f"accepted at {depth}" for depth in depths), "acceptance length"]
    names.append(f"answers of plain greedy, of {served['prompts']}")
    rows = [names]
    for name, each in (("ours", served["ours"]), (f"{served['engine']} {served['version']}", served["theirs"])):
        counts = [each["rounds"], each["drafted"], *each["accepted_at"]]
        cells = [*(f"{count:,}" for count in counts), f"{each['acceptance_length']:.3f}", str(each["plain_greedy_answers"])]
        rows.append([escape(name), *cells])
    return html_table(rows)


def figure(plot: Callable[[Axes, Mapping[str, Figures]], bool], drafters: Mapping[str, Figures]) -> str:
    """A plot as SVG; nothing where there is nothing to show."""
    drawn, buffer = Figure(figsize=(11, 4), layout="constrained"), io.StringIO()
    has_content = plot(drawn.subplots(), drafters)
    drawn.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :] if has_content else ""


def put_legend(axes: Axes) -> None:
    """Baseline the plot: many drafters leave no room inside."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def plot_positions(axes: Axes, drafters: Mapping[str, Figures]) -> bool:
    for name, each in drafters.items():
        rates = each["acceptance_rate_at"]
        if each["drafted"]:
            positions = range(len(rates))
            (line,) = axes.plot(positions, rates, marker="o", label=name)
            if each["intervals"] is not None:
                low, high = zip(*each["intervals"]["acceptance_rate_at"], strict=True)
                axes.fill_between(positions, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set_xticks(positions)
    axes.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, 1))
    put_legend(axes)
    return True


def plot_groups(axes: Axes, drafters: Mapping[str, Figures], key: str, prefix: str) -> bool:
    groups = list(dict.fromkeys(name for each in drafters.values() for name in each[key]))
    shown = {name: each for name, each in drafters.items() if each["drafted"]}
    width = 0.8 / max(len(shown), 1)
    for index, (name, each) in enumerate(shown.items()):
        places = [i + (index - (len(shown) - 1) / 2) * width for i, group in enumerate(groups) if group in each[key]]
        lengths = [each[key][group]["acceptance_length"] for group in groups if group in each[key]]
        axes.bar(places, lengths, width * 0.92, label=name)
    counts = {group: max(each[key][group]["prompts"] for each in drafters.values() if group in each[key]) for group in groups}
    axes.set_xticks(range(len(groups)), [f"{prefix} {group}\n{counts[group]} prompts".strip() for group in groups], fontsize=9)
    axes.set(ylabel="acceptance length", ylim=(1, None))
    put_legend(axes)
    return len(groups) > 0


def plot_prompts(axes: Axes, drafters: Mapping[str, Figures]) -> bool:
    """Share of prompts with at least this length: curves of many drafters lie beside each other where bars would cover one another."""
    for name, each in drafters.items():
        if lengths := sorted(each["acceptance_length_of_prompts"], reverse=True):
            axes.step(lengths, [(i + 1) / len(lengths) for i in range(len(lengths))], where="post", label=name)
    axes.set(xlabel="acceptance length of at least", ylabel="share of prompts", ylim=(0, 1))
    put_legend(axes)
    return True


def plot_overlap(axes: Axes, drafters: Mapping[str, Figures]) -> bool:
    """sum min(p, q), the chance of a sampled draft, solid; the share that was accepted dashed."""
    shown = {name: each["quality"] for name, each in drafters.items() if each.get("quality")}
    for name, quality in shown.items():
        positions = range(len(quality["overlap_at"]))
        (line,) = axes.plot(
            positions, quality["overlap_at"], marker="o", label=f"{name}: sum min(p, q) at {quality['temperature']:g}"
        )
        axes.plot(positions, quality["accepted_at"], marker="x", linestyle="--", color=line.get_color(), label=f"{name}: accepted")
        axes.set_xticks(positions)
    axes.set(xlabel="position of the draft", ylabel="mean over rounds", ylim=(0, 1))
    if shown:
        put_legend(axes)
    return bool(shown)


def plot_calibration(axes: Axes, drafters: Mapping[str, Figures]) -> bool:
    """Of a greedy output too, which takes its likeliest token, so that drafts are accepted more often than their probability."""
    shown = {name: each["quality"] for name, each in drafters.items() if each.get("quality") and each["quality"]["calibration"]}
    for name, quality in shown.items():
        label = f"{name}: off by {quality['calibration_error']:.3f}"
        confidence = [tenth["confidence"] for tenth in quality["calibration"]]
        axes.plot(confidence, [tenth["accepted"] for tenth in quality["calibration"]], marker="o", label=label)
    axes.plot([0, 1], [0, 1], color="#999", linewidth=0.8)
    axes.set(xlabel="the head's probability for its draft", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    if shown:
        put_legend(axes)
    return bool(shown)


def plot_costs(axes: Axes, drafters: Mapping[str, Figures]) -> bool:
    """Milliseconds of each phase for each new token, on the first rank."""
    names = list(drafters)[::-1]
    left = [0.0] * len(names)
    for phase in (*PHASES, "rest"):
        spent = []
        for name in names:
            seconds, per_token = drafters[name]["seconds"], 1e3 / drafters[name]["tokens_per_s"]
            named = sum(seconds.get(each, 0.0) for each in PHASES)
            spent.append((seconds["all"] - named if phase == "rest" else seconds.get(phase, 0.0)) / seconds["all"] * per_token)
        axes.barh(names, spent, left=left, label=phase)
        left = [a + b for a, b in zip(left, spent, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.text(total, names.index(name), f" {drafters[name]['tokens_per_s']:,.0f} tokens/s", va="center", fontsize=9)
    axes.set(xlabel="ms per new token", xlim=(0, max(left) * 1.2))
    axes.legend(fontsize=9, ncols=len(PHASES) + 1, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return True
