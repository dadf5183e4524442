"""The report of stage 1, printed and stored as report.json: counts, lengths, and what was left out and why.

Its items are the files, the conversations or the rows of tokens that the source holds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mtptrain.config import PromptSource
from mtptrain.data.prompt_files import Documents, Split, is_held_out
from mtptrain.training.batches import draft_spans

_NAMES_SHOWN = 3
COUNTS = {
    "rewritten_answers": "chat template: {:,} assistant turns change once later turns follow, and are also stored as "
    "generated",
    "rewritten_documents": "chat template: {:,} additional documents hold these turns",
    "rewritten_tokens": "chat template: {:,} tokens are in these documents",
    "history_tokens": "chat template: {:,} of these tokens repeat the history",
    "same_question": "same question: {:,} {items} repeat an earlier question; all of one question are in one split",
    "questions": "same question: {:,} questions are different",
    "near_duplicates": "near duplicates: {:,} different questions nearly repeat another one",
    "near_moved": "near duplicates: {:,} {items} changed sides, so that such questions are in one split",
    "copies": "left out: {:,} {items} with the same tokens as another one",
    "items_cut": "cut: {:,} {items}, longer than prompts.max_document_tokens",
    "windows_cut": "cut: {:,} windows are made of these",
    "windows_unsupervised": "left out: {:,} windows without a supervised token",
    "answers_left_out": "left out of the loss: {:,} assistant turns that the template does not render as generated",
    "answers_untrained": "left out of the loss: {:,} assistant turns that are not to be trained",
    "answers_inserted": "chat template: {:,} answers begin or end with text that it inserts, which the target "
    "then has to generate unless it is an empty think block; if your server's prompt holds it, use "
    "+prompts.template_kwargs.enable_thinking=false",
    "is_dated": "chat template: it can write the date of this run into the prompts (strftime_now)",
    "without_drafts": "not drafted: {:,} documents whose answers are too short to draft a token",
    "beyond_max_train_tokens": "left out: {:,} {items} beyond prompts.max_train_tokens, in whole or in part",
}
"""The names of counts, over the items that were read before the training split was full, and the line that each prints
if it is not zero."""


@dataclass(frozen=True)
class SplitReport:
    documents: int
    """Number of documents written: whole items, windows of longer ones, and those of rewritten answers."""
    tokens: int
    supervised_tokens: int
    """Number of tokens with loss mask 1."""
    longest: int
    """Number of tokens of the longest document."""

    @staticmethod
    def of(documents: Documents) -> "SplitReport":
        supervised_tokens, longest = int(documents.loss_mask.sum()), int(documents.lengths.max(initial=0))
        return SplitReport(len(documents), len(documents.input_ids), supervised_tokens, longest)


@dataclass(frozen=True)
class Refusals:
    """Items left out for one reason."""

    reason: str
    count: int
    first: list[str]
    """Locations of the first few."""


@dataclass
class PromptsReport:
    source: str
    items: int
    """Number of items of the source, including refused ones and those beyond prompts.max_train_tokens."""
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers by their names in `COUNTS`."""
    splits: dict[Split, SplitReport] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    """Names of columns and message keys that are not read."""
    refused: list[Refusals] = field(default_factory=list)


def count_questions(groups: Sequence[str], clusters: Sequence[str], validation_fraction: float) -> dict[str, int]:
    """Returns the counts of repeated questions for the group and the cluster of each item.

    Conversations with the same question form a group, as do rows of tokens with the same tokens before the first
    supervised one, and all of a group goes into one split. Each file is a group by itself.
    """
    questions = len(set(groups))
    if questions == len(set(clusters)) == len(groups):
        return {}
    members = Counter(dict(zip(groups, clusters, strict=True)).values())
    return {
        "questions": questions,
        "same_question": len(groups) - questions,
        "near_duplicates": sum(count for count in members.values() if count > 1),
        "near_moved": sum(
            is_held_out(group, validation_fraction) != is_held_out(cluster, validation_fraction)
            for group, cluster in zip(groups, clusters, strict=True)
        ),
    }


def has_drafts(mask: NDArray[np.uint8]) -> bool:
    """Returns whether a document with this loss mask [S] has a draft position: two generated tokens after a token."""
    return len(draft_spans(mask)[0]) > 0


def group_refusals(refused: Mapping[str, str]) -> list[Refusals]:
    """Counts refusals, given by location, by reason: the most frequent first, with the first few locations of each."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    groups = [Refusals(reason, len(names), names[:_NAMES_SHOWN]) for reason, names in by_reason.items()]
    return sorted(groups, key=lambda group: -group.count)


def print_report(report: PromptsReport) -> None:
    console = Console(markup=False, highlight=False)
    table = Table("split", title=f"prompts from {report.source}", title_justify="left")
    for heading in ("documents", "tokens", "supervised tokens", "longest document"):
        table.add_column(heading, justify="right")
    for name, split in report.splits.items():
        counts = (split.documents, split.tokens, split.supervised_tokens, split.longest)
        table.add_row(name, *(f"{count:,}" for count in counts))
    console.print(table)
    for line in report_lines(report):
        console.print(line, soft_wrap=True)


def report_lines(report: PromptsReport) -> list[str]:
    """Returns the lines below the table, of which each has a count that is not zero."""
    words: dict[str, str] = {PromptSource.text_files: "files", PromptSource.tokens: "rows"}
    items, counts = words.get(report.source, "conversations"), report.counts
    lines = [line.format(counts[name], items=items) for name, line in COUNTS.items() if counts[name]]
    if report.passed_over:
        lines.append(f"passed over, because they are not read: {', '.join(report.passed_over)}")
    for refusals in report.refused:
        more = ", ..." if refusals.count > len(refusals.first) else ""
        lines.append(f"refused: {refusals.count:,} ({refusals.reason}): {', '.join(refusals.first)}{more}")
    if report.refused:
        refused = sum(refusals.count for refusals in report.refused)
        lines.append(f"refused: {refused:,} of the {report.items:,} {items} of the source")
    return lines
