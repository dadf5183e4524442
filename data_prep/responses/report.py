"""Prints a summary of mtptrain responses."""

import json
from pathlib import Path

from rich.table import Table

from mtptrain.command_line.tables import wide_console

from ..prompts_report import group_refusals
from .dialogue import Ending
from .manifest import ResponsesManifest
from .store import FAILURES


def print_report(directory: Path, manifest: ResponsesManifest, num_turns: int, this_run: str) -> None:
    """Print the table and, for each reason, the number of conversations left out or ended early and the first of them.

    Args:
        directory: the responses directory, whose `failures.jsonl` has the reasons.
        manifest: the manifest in `directory`.
        num_turns: number of responses to generate in all conversations.
        this_run: what this run has generated, and how fast.
    """
    table = Table(title="mtptrain responses", show_header=False)
    counts = manifest.counts
    rows = {
        "conversations": f"{counts.conversations + manifest.failed:,} usable, {manifest.refused:,} refused",
        "turns to generate": f"{num_turns:,}",
        "responses": f"{counts.answers:,} in {counts.conversations - counts.unanswered:,} conversations",
        "tokens": f"{counts.answer_tokens:,}",
        "cut at max_new_tokens": f"{counts.ended_by[Ending.length]:,} responses, each the last of its conversation",
        "rendered differently": f"{counts.texts_changed:,} responses with other text, {counts.tokens_changed:,} with "
        "the same text but other tokens",
        "failed": f"{manifest.failed:,} conversations, retried by the next run",
        "this run": this_run,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = wide_console(80, markup=False, highlight=False)
    console.print(table)
    failures = [json.loads(line) for line in (directory / FAILURES).read_text(encoding="utf-8").splitlines()]
    for group in group_refusals({failure["place"]: failure["reason"] for failure in failures}):
        named = f"{group.reason}; first: {', '.join(group.first)}"
        console.print(f"{group.count:,} left out or ended early: {named}", soft_wrap=True)
    print(f"written to {directory}; {FAILURES} lists the conversations that were left out or ended early", flush=True)
