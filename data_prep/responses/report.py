"""What data_prep.responses did, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..prompts_report import group_refusals
from .dialogue import Ending
from .manifest import Manifest
from .store import FAILURES
from .survey import Survey

EARLY_ENDS = {
    Ending.empty: "empty answer",
    Ending.context: "beyond the context",
    Ending.template: "refused by template",
}


@dataclass
class Progress:
    """What a run, or a rank of it, did."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)
    """Why, by row."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @staticmethod
    def merge(parts: list["Progress"]) -> "Progress":
        """That of all ranks."""
        failed = {row: reason for part in parts for row, reason in part.failed.items()}
        return Progress(
            sum(part.rows for part in parts), sum(part.tokens for part in parts), max(part.seconds for part in parts), failed
        )


def print_report(directory: Path, manifest: Manifest, survey: Survey, progress: Progress, left_out: Mapping[str, str]) -> None:
    """Print the table and, for each reason, how much was left out and its first places.

    Args:
        directory: of the answers.
        manifest: of all of them.
        survey: of the input.
        progress: of this run.
        left_out: why, by place.
    """
    table = Table(title="data_prep.responses", show_header=False)
    for name, value in report_rows(manifest, survey, progress).items():
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 80)
    console.print(table)
    for group in group_refusals(left_out):
        console.print(f"{group.count:,} left out: {group.reason}; first: {', '.join(group.first)}", soft_wrap=True)
    print(f"written to {directory}; {FAILURES} names what was left out or ended early", flush=True)


def report_rows(manifest: Manifest, survey: Survey, progress: Progress) -> dict[str, str]:
    counts, ended = manifest.counts, manifest.counts.ended_by
    speed = f"{progress.tokens:,} tokens, {progress.tokens_per_s:,.0f} tokens/s"
    return {
        "conversations": f"{len(survey.turns):,} to answer, {manifest.refused:,} refused",
        "turns to answer": f"{sum(survey.turns.values()):,}",
        "answers": f"{counts.answers:,} in {counts.conversations - counts.unanswered:,} conversations",
        "tokens": f"{counts.answer_tokens:,}",
        "cut at max_new_tokens": f"{ended[Ending.length]:,} answers, the last of their conversations",
        **{name: f"{ended[ending]:,} conversations end before it" for ending, name in EARLY_ENDS.items()},
        "rendered otherwise": f"{counts.texts_changed:,} answers as text, {counts.tokens_changed:,} more as tokens",
        "failed": f"{manifest.failed:,} conversations, tried again by a further run",
        "this run": f"{progress.rows:,} conversations, {speed}",
    }
