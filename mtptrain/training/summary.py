"""Formats the progress bar of a training run, and prints the summary table at the end of the run."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mtptrain.config import TrainConfig
from mtptrain.engines.verdict import LEAST_LENGTH
from mtptrain.heads.files import best_or_last, kept_heads
from mtptrain.training.checkpoint import Progress
from mtptrain.training.metrics import METRICS, PHASES, read_metrics
from mtptrain.training.trainer import warmup_of
from mtptrain.utils.figures import shown

MEASURED = ("tokens_per_s", "draft_positions_per_s", "mfu", "data_wait_share", *(f"{name}_share" for name in PHASES))


def in_progress_bar(record: dict[str, Any]) -> dict[str, str]:
    return {
        "loss": f"{record['loss']:.3f}",
        "tok/s": f"{record['tokens_per_s']:,.0f}",
        "draft positions/s": f"{record['draft_positions_per_s']:,.0f}",
        "data": f"{record['data_wait_share']:.0%}",
        "mfu": f"{record['mfu']:.0%}",
        "GB": f"{record['peak_bytes'] / 1e9:.1f}",
    }


def print_summary(stage_dir: Path, progress: Progress, settings: TrainConfig) -> None:
    table = Table(title="mtptrain train", show_header=False)
    table.add_row("steps", f"{progress.step:,}")
    program = "mtptrain choose-head" if kept_heads(stage_dir) else "mtptrain acceptance"
    records = [record for _, record in read_metrics(stage_dir / METRICS)]
    best = shown(progress.best_acceptance_length or None) or f"not measured: run {program}"
    for name, value in (*(best_rows(records) or [("best acceptance length", best)]), *speed_rows(records)):
        table.add_row(name, value)
    head_dir = best_or_last(stage_dir)
    Console().print(table)
    print(f"{head_dir.name} head: {head_dir}; metrics: {stage_dir / METRICS}")  # a table would cut off the paths
    lengths = [record["acceptance_length"] for record in records if "acceptance_length" in record]
    for warning in shortcomings(settings, progress.step, lengths):
        print(f"WARNING {warning}")


def shortcomings(settings: TrainConfig, num_steps: int, lengths: Sequence[float | None]) -> list[str]:
    """Returns why a head of a finished run may not be worth serving, and what to do. `lengths` were measured; None
    stands for a measurement whose rounds had no draft."""
    more, found = "train on more text, or raise train.epochs (in another run_dir, or after removing this head)", []
    if num_steps and warmup_of(settings, num_steps) >= num_steps:
        found.append(
            f"train.warmup_steps: must be fewer than the run's {num_steps:,} steps, but all of them were warm-up; "
            f"lower train.warmup_share, or {more}"
        )
    best = max((length or 1.0 for length in lengths), default=LEAST_LENGTH)
    if best < LEAST_LENGTH:
        found.append(
            f"train: acceptance length must be above {LEAST_LENGTH} for a head to gain anything over plain decoding, "
            f"but is {best:.3f} after {num_steps:,} steps; {more}"
        )
    return found


def best_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the best step of a run, and the held-out KL if it was higher after this step. Nothing if not measured."""
    measured = [record for record in records if record.get("acceptance_length")]
    if not measured:
        return []
    best = max(measured, key=lambda record: record["acceptance_length"])
    rows = [("best acceptance length", f"{best['acceptance_length']:.3f} at step {best['step']:,}")]
    kls = [(record["step"], record.get("held_out_kl_at", [None])[0]) for record in measured]
    after = [(step, kl) for step, kl in kls if kl is not None and step >= best["step"]]
    higher = [(step, kl) for step, kl in after if kl > after[0][1]]
    if higher:
        (first, at_first), (last, at_last) = higher[0], after[-1]
        risen = f"{after[0][1]:.3f} there, {at_first:.3f} at step {first:,}, {at_last:.3f} at step {last:,}"
        rows.append(("held-out KL of depth 0", f"rose after that: {risen}"))
    return rows


def speed_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns the rows about speed and memory.

    Speeds and shares of time are medians over the records of the run, tokens a sum over them. Peak memory is that since
    the last start, on the rank that used the most.
    """
    records = [record for record in records if "tokens_per_s" in record]
    if not records:  # the file was removed or emptied
        return []
    median = {name: statistics.median(record[name] for record in records) for name in MEASURED}
    shares = (f"{name.replace('_', ' ')} {median[f'{name}_share']:.0%}" for name in ("data_wait", *PHASES))
    return [
        ("tokens", f"{sum(record['tokens'] for record in records):,.0f}"),
        ("per second", f"{median['tokens_per_s']:,.0f} tokens, {median['draft_positions_per_s']:,.0f} draft positions"),
        ("MFU", f"{median['mfu']:.1%}"),
        ("time", ", ".join(shares)),
        ("peak memory", f"{records[-1]['peak_bytes'] / 1e9:.2f} GB"),
    ]
