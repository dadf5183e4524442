"""Formats the progress bar of a training run, and prints the summary table at the end of the run."""

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mtptrain.heads.files import best_or_last, kept_heads
from mtptrain.training.checkpoint import Progress
from mtptrain.training.metrics import METRICS, PHASES, read_metrics

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


def print_summary(stage_dir: Path, progress: Progress) -> None:
    best = progress.best_acceptance_length
    table = Table(title="mtptrain train", show_header=False)
    table.add_row("steps", f"{progress.step:,}")
    program = "mtptrain choose-head" if kept_heads(stage_dir) else "mtptrain acceptance"
    table.add_row("best acceptance length", f"{best:.3f}" if best else f"not measured: run {program}")
    for name, value in speed_rows(stage_dir / METRICS):
        table.add_row(name, value)
    head_dir = best_or_last(stage_dir)
    Console().print(table)
    print(f"{head_dir.name} head: {head_dir}; metrics: {stage_dir / METRICS}")  # a table would cut off the paths


def speed_rows(metrics: Path) -> list[tuple[str, str]]:
    """Returns the rows about speed and memory.

    Speeds and shares of time are medians over the records of the run, tokens a sum over them. Peak memory is that since
    the last start, on the rank that used the most.
    """
    records = [record for _, record in read_metrics(metrics) if "tokens_per_s" in record]
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
