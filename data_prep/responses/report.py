"""Prints a summary of mtptrain responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from mtptrain.command_line.tables import wide_console

from ..prompts_report import group_refusals
from .dialogue import Ending
from .manifest import ResponsesManifest
from .store import FAILURES
from .survey import Survey

EARLY_ENDS = {  # short forms of `ENDINGS` in store.py, for a table
    Ending.empty: "empty response",
    Ending.context: "prompt too long",
    Ending.template: "refused by template",
}


@dataclass
class ResponsesProgress:
    """Counts for a run, or for one of its ranks."""

    rows: int = 0
    """Number of conversations that were regenerated."""
    tokens: int = 0
    """Number of generated tokens, including end-of-sequence tokens."""
    seconds: float = 0.0
    """Seconds of generation, loading the target included."""
    failed: dict[int, str] = field(default_factory=dict)
    """Reason for each failure, by row."""

    @staticmethod
    def merge(parts: list["ResponsesProgress"]) -> "ResponsesProgress":
        """Returns the sums over all ranks, with the time of the slowest rank."""
        failed = {row: reason for part in parts for row, reason in part.failed.items()}
        return ResponsesProgress(
            sum(part.rows for part in parts),
            sum(part.tokens for part in parts),
            max(part.seconds for part in parts),
            failed,
        )


def print_report(
    directory: Path,
    manifest: ResponsesManifest,
    survey: Survey,
    progress: ResponsesProgress,
    left_out: Mapping[str, str],
) -> None:
    """Print the table and, for each reason, the number of conversations left out and the first few of them.

    Args:
        directory: the responses directory.
        manifest: the manifest in `directory`.
        survey: survey of the input.
        progress: counts of this run.
        left_out: why each conversation was left out, by location.
    """
    table = Table(title="mtptrain responses", show_header=False)
    counts, ended = manifest.counts, manifest.counts.ended_by
    speed = f"{progress.tokens:,} tokens, {progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
    rows = {
        "conversations": f"{len(survey.turns):,} usable, {manifest.refused:,} refused",
        "turns to generate": f"{sum(survey.turns.values()):,}",
        "responses": f"{counts.answers:,} in {counts.conversations - counts.unanswered:,} conversations",
        "tokens": f"{counts.answer_tokens:,}",
        "cut at max_new_tokens": f"{ended[Ending.length]:,} responses, each the last of its conversation",
        **{name: f"{ended[ending]:,} conversations ended early" for ending, name in EARLY_ENDS.items()},
        "rendered differently": f"{counts.texts_changed:,} responses with other text, {counts.tokens_changed:,} with "
        "the same text but other tokens",
        "failed": f"{manifest.failed:,} conversations, retried by the next run",
        "this run": f"{progress.rows:,} conversations, {speed}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = wide_console(80, markup=False, highlight=False)
    console.print(table)
    for group in group_refusals(left_out):
        console.print(f"{group.count:,} left out: {group.reason}; first: {', '.join(group.first)}", soft_wrap=True)
    print(f"written to {directory}; {FAILURES} lists the conversations that were left out or ended early", flush=True)
