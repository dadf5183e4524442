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


@dataclass(frozen=True)
class SplitReport:
    documents: int
    """Number of documents written: whole items, windows of longer ones, and those of `RewrittenReport`."""
    tokens: int
    supervised_tokens: int
    """Number of tokens with loss mask 1."""
    without_drafts: int
    """Number of these documents whose answers are too short to draft any token."""
    longest: int
    """Number of tokens of the longest document."""

    @staticmethod
    def of(documents: Documents) -> "SplitReport":
        return SplitReport(
            documents=len(documents),
            tokens=len(documents.input_ids),
            supervised_tokens=int(documents.loss_mask.sum()),
            without_drafts=sum(not has_drafts(documents.mask(i)) for i in range(len(documents))),
            longest=int(documents.lengths.max(initial=0)),
        )


@dataclass
class RewrittenReport:
    """The cost of a template that renders a turn differently, such as without reasoning, once later turns follow."""

    answers: int = 0
    """Number of assistant turns that need an additional document.

    Counts those in the items that were read before the training split was full.
    """
    documents: int = 0
    """Number of windows written for these documents."""
    tokens: int = 0
    """Number of tokens in these windows."""
    history_tokens: int = 0
    """Number of unsupervised tokens in these windows, which repeat the history."""

    def add(self, mask: NDArray[np.uint8]) -> None:
        """Counts a window with this loss mask [S]."""
        self.documents += 1
        self.tokens += len(mask)
        self.history_tokens += len(mask) - int(mask.sum())


@dataclass
class DuplicatesReport:
    """Counts repeated questions and copies.

    Conversations with the same question form a group, as do rows of tokens with the same tokens before the first
    supervised one, and all of a group goes into one split. Each file is a group by itself.
    """

    questions: int
    """Number of groups: different questions, or files."""
    largest: int
    """Number of items with the most frequent question; 1 for files."""
    same_question: int
    """Number of items that repeat the question of an earlier one."""
    dropped: int = 0
    """Number of items left out because an earlier one has the same tokens and loss mask."""
    near: int = 0
    """Number of questions that nearly repeat another one (prompts.near_duplicate_similarity)."""
    near_moved: int = 0
    """Number of conversations with such a question that would have been on the other side of the split."""

    @staticmethod
    def of(groups: Sequence[str], clusters: Sequence[str], validation_fraction: float) -> "DuplicatesReport":
        """Returns the counts for the group and the cluster of each item."""
        sizes = Counter(groups)
        members = Counter(dict(zip(groups, clusters, strict=True)).values())
        return DuplicatesReport(
            questions=len(sizes),
            largest=max(sizes.values(), default=0),
            same_question=len(groups) - len(sizes),
            near=sum(count for count in members.values() if count > 1),
            near_moved=sum(
                is_held_out(group, validation_fraction) != is_held_out(cluster, validation_fraction)
                for group, cluster in zip(groups, clusters, strict=True)
            ),
        )


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
    duplicates: DuplicatesReport
    passed_over: list[str] = field(default_factory=list)
    """Names of columns and message keys that are not read."""
    splits: dict[Split, SplitReport] = field(default_factory=dict)
    items_cut: int = 0
    """Number of items, of those that were read, longer than prompts.max_document_tokens."""
    windows_cut: int = 0
    """Number of windows that these items were cut into."""
    windows_unsupervised: int = 0
    """Number of windows left out because they have no supervised token."""
    rewritten: RewrittenReport = field(default_factory=RewrittenReport)
    answers_left_out: int = 0
    """Number of assistant turns that the loss leaves out, because the template does not render them after their
    prompt, its generation block has none of their text, or a token across their border cannot be split."""
    answers_untrained: int = 0
    """Number of assistant turns that the loss leaves out, because the data say so (`weight: 0`, `train: false`)."""
    answers_inserted: int = 0
    """Number of supervised assistant turns that begin or end with the template's text, such as an empty think block."""
    beyond_max_train_tokens: int = 0
    """Number of items left out, in whole or in part, because of prompts.max_train_tokens."""
    refused: list[Refusals] = field(default_factory=list)
    is_dated: bool = False
    """Whether the chat template can write today's date into the prompts."""


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
    """Returns the lines below the tables, of which each has a count that is not zero."""
    words: dict[str, str] = {PromptSource.text_files: "files", PromptSource.tokens: "rows"}
    items = words.get(report.source, "conversations")
    rewritten, duplicates = report.rewritten, report.duplicates
    total = max(sum(split.tokens for split in report.splits.values()), 1)
    too_short = sum(split.without_drafts for split in report.splits.values())
    counted = {
        "chat template: {:,} assistant turns change once later turns follow, and are also stored as generated, in "
        f"{rewritten.documents:,} additional documents with {rewritten.tokens:,} tokens "
        f"({rewritten.tokens / total:.1%} of all), of which {rewritten.history_tokens:,} "
        f"({rewritten.history_tokens / total:.1%}) repeat the history": rewritten.answers,
        f"same question: {{:,}} {items} repeat an earlier question; each of the {duplicates.questions:,} different "
        f"questions occurs in at most {duplicates.largest:,} {items}, all of them in one split": (
            duplicates.same_question
        ),
        "near duplicates: {:,} different questions nearly repeat another one; "
        f"{duplicates.near_moved:,} {items} changed sides, so that such questions are in one split": duplicates.near,
        f"left out: {{:,}} {items} with the same tokens as another one": duplicates.dropped,
        f"cut: {{:,}} {items} into {report.windows_cut:,} windows": report.items_cut,
        "left out: {:,} windows without a supervised token": report.windows_unsupervised,
        "left out of the loss: {:,} assistant turns that the chat template does not render as generated": (
            report.answers_left_out
        ),
        "left out of the loss: {:,} assistant turns that are not to be trained": report.answers_untrained,
        "chat template: {:,} answers begin or end with text that the template inserts, which the target then has to "
        "generate unless it is an empty think block; if your server's prompt holds it, use "
        "+prompts.template_kwargs.enable_thinking=false": report.answers_inserted,
        "chat template: it can write the date of this run into the prompts (strftime_now)": report.is_dated,
        "not drafted: {:,} documents whose answers are too short to draft a token": too_short,
        f"left out: {{:,}} {items} beyond prompts.max_train_tokens": report.beyond_max_train_tokens,
    }
    lines = [text.format(count) for text, count in counted.items() if count]
    if report.passed_over:
        lines.append(f"passed over, because they are not read: {', '.join(report.passed_over)}")
    for refusals in report.refused:
        more = ", ..." if refusals.count > len(refusals.first) else ""
        lines.append(f"refused: {refusals.count:,} ({refusals.reason}): {', '.join(refusals.first)}{more}")
    if report.refused:
        refused = sum(refusals.count for refusals in report.refused)
        lines.append(f"refused: {refused:,} of the {report.items:,} {items} of the source")
    return lines
