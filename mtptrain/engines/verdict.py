"""Says what a head gains, from the reports of mtptrain acceptance and mtptrain serving-bench."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtptrain.config import PipelineConfig
from mtptrain.utils.files import read_sealed

Figures = Mapping[str, Any]

LEAST_LENGTH = 1.05
"""Tokens per step, or acceptance length, below which a head gains nothing over plain decoding, which has 1."""
LITTLE_LENGTH = 1.3
"""Tokens per step below which no engine that was measured on a CPU gains more than it costs to draft."""
LEAST_SPEED_UP = 1.03
"""Speed-up below which an engine gains nothing: measurements differ by more."""
MORE_TRAINING = (
    "train it on more answers of the target (prompts.paths), for more epochs (train.epochs) or at another rate "
    "(train.lr), and see in run_dir/train/metrics.jsonl whether the loss still falls"
)


def bench_of(config: PipelineConfig, report: Figures) -> Figures | None:
    """Returns the report of mtptrain serving-bench, if there is one of the head that was measured here."""
    path = Path(config.serving.output_dir or config.run_dir) / "serving_bench" / "report.json"
    if not path.is_file():
        return None
    found: Figures = read_sealed(path, "run mtptrain serving-bench again")
    return found if found["head_sha256"] == report["head_sha256"] and best_rows(found) else None


def best_rows(bench: Figures) -> dict[int, Figures]:
    """Returns the fastest row with drafts by the number of requests in flight, where plain decoding was measured."""
    drafting = [row for row in bench["rows"] if row["num_speculative_tokens"] and row["speed_up"]]
    return {row["concurrency"]: row for row in sorted(drafting, key=lambda row: row["speed_up"])}


def gains(bench: Figures) -> str:
    """Returns what an engine gains with the head at each number of requests in flight."""
    best = sorted(best_rows(bench).items())
    parts = [f"{row['speed_up'] - 1:.0%} with {n} in flight" for n, row in best if row["speed_up"] >= LEAST_SPEED_UP]
    without = [str(n) for n, row in best if row["speed_up"] < LEAST_SPEED_UP]
    parts += [f"nothing with {' or '.join(without)}"] if without else []
    return f"{bench['engine']} {bench['version']} gains {', '.join(parts)}"


def why_not_better(report: Figures) -> str:
    """Returns why a head is not better than the one that it started from; "" if it is."""
    before, after = (each["acceptance_length"] or 1.0 for each in (report["baselines"]["initial"], report))
    return f"acceptance length {before:.3f} before and {after:.3f} after, {report['prompts']} prompts" * (
        after <= before
    )


def verdict(report: Figures, bench: Figures | None) -> str:
    """Returns in a sentence or two what a head gains and, if that is nothing, what to do."""
    length, lookup = report["tokens_per_step"], report["baselines"].get("prompt_lookup", {}).get("tokens_per_step")
    if length is None:
        return "No step was measured."
    interval = (report["intervals"] or {}).get("tokens_per_step")
    bounds = " ({:.2f} to {:.2f} with 95 % confidence)".format(*interval) if interval else ""
    said = f"{length:.2f} tokens per step{bounds} over {report['prompts']:,} prompts, where plain decoding has 1"
    if lookup is not None:
        said += f" and prompt lookup {lookup:.2f}"
    said += f"; {gains(bench)}." if bench else "."
    if length < LEAST_LENGTH:
        return f"{said} The head gains nothing: {MORE_TRAINING}."
    if lookup is not None and length <= lookup:
        gain = "as much" if f"{length:.2f}" == f"{lookup:.2f}" else "more"
        return f"{said} Prompt lookup needs no head and gains {gain}: serve without this, or {MORE_TRAINING}."
    return said if bench or length >= LITTLE_LENGTH else f"{said} That is little: {MORE_TRAINING}."
