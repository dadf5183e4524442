"""What stage 1 made: counts per split, lengths, and what was left out and why; printed, and kept as report.json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mtptrain.data.prompt_files import Documents, Split

_NAMES_SHOWN = 3
_BAR_WIDTH = 30


@dataclass(frozen=True)
class SplitReport:
    documents: int
    """Windows written."""
    tokens: int
    supervised_tokens: int
    """Those with loss mask 1."""
    lengths: dict[int, int]
    """Documents by length: key n counts those longer than n / 2 and at most n tokens."""

    @staticmethod
    def of(documents: Documents) -> "SplitReport":
        return SplitReport(
            documents=len(documents),
            tokens=len(documents.input_ids),
            supervised_tokens=int(documents.loss_mask.sum()),
            lengths=length_histogram(documents.lengths.tolist()),
        )


@dataclass(frozen=True)
class RewrittenReport:
    """What it costs that the chat template shows answers otherwise once the conversation goes on, as Qwen3's strips reasoning."""

    answers: int
    """With their history in documents of their own, beside the first one of their conversation; before prompts.max_train_tokens."""
    documents: int
    """Windows written for them."""
    tokens: int
    """Of these windows."""
    history_tokens: int
    """Of these, those that do not count in the loss: history stored again."""


@dataclass(frozen=True)
class DuplicatesReport:
    """How often the same is asked. All conversations that ask the same question are on one side of the split."""

    questions: int
    """Different ones: groups that the split keeps together. A file is a group of its own."""
    largest: int
    """Conversations in the largest group."""
    same_question: int
    """Conversations beyond the first of each group."""
    dropped: int
    """Conversations left out because they become the same tokens as another one."""
    kept: int
    """Files that become the same tokens as another one, and are not left out."""

    @staticmethod
    def of(groups: Sequence[str], copies: int, are_kept: bool) -> "DuplicatesReport":
        sizes = Counter(groups)
        dropped, kept = (0, copies) if are_kept else (copies, 0)
        return DuplicatesReport(len(sizes), max(sizes.values(), default=0), len(groups) - len(sizes), dropped, kept)


@dataclass(frozen=True)
class Refusals:
    """Files or rows left out for one reason."""

    reason: str
    count: int
    first: list[str]


@dataclass(frozen=True)
class PromptsReport:
    source: str
    splits: dict[Split, SplitReport]
    documents_cut: int
    """Files or conversations longer than prompts.max_document_tokens."""
    windows_cut: int
    """What they became."""
    windows_unsupervised: int
    """Windows left out because no token of them counts in the loss."""
    rewritten: RewrittenReport
    duplicates: DuplicatesReport
    answers_left_out: int
    """Answers left out of the loss: the chat template never shows them behind the prompt for them."""
    beyond_max_train_tokens: int
    """Files or conversations left out, wholly or in part, by prompts.max_train_tokens."""
    refused: list[Refusals]


def length_histogram(lengths: Sequence[int]) -> dict[int, int]:
    """Counts by the least power of two that a length does not exceed, without gaps between the first and the last."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    return {2**power: counts[power] for power in range(min(counts), max(counts) + 1)} if counts else {}


def group_refusals(refused: Mapping[str, str]) -> list[Refusals]:
    """From name -> reason to one entry per reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    groups = [Refusals(reason, len(names), names[:_NAMES_SHOWN]) for reason, names in by_reason.items()]
    return sorted(groups, key=lambda group: -group.count)


def print_report(report: PromptsReport) -> None:
    console = Console(markup=False, highlight=False)
    console.print(_split_table(report))
    console.print(_length_table(report))
    for line in [*_stored_again(report), *_duplicates(report), *_left_out(report)]:
        console.print(line, soft_wrap=True)


def _split_table(report: PromptsReport) -> Table:
    table = Table("split", title=f"prompts from {report.source}", title_justify="left")
    for heading in ("documents", "tokens", "supervised tokens"):
        table.add_column(heading, justify="right")
    for name, split in report.splits.items():
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.supervised_tokens:,}")
    return table


def _length_table(report: PromptsReport) -> Table:
    total = Counter[int]()
    for split in report.splits.values():
        total.update(split.lengths)
    table = Table(title="document lengths", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("")
    for longest in sorted(total):
        bar = "█" * round(_BAR_WIDTH * total[longest] / max(total.values()))
        table.add_row(f"{longest // 2 + 1:,} - {longest:,}" if longest > 2 else f"{longest}", f"{total[longest]:,}", bar)
    return table


def _stored_again(report: PromptsReport) -> list[str]:
    rewritten, total = report.rewritten, sum(split.tokens for split in report.splits.values())
    if not rewritten.answers:
        return []
    return [
        f"rewritten in later turns by the chat template: {rewritten.answers:,} answers, in {rewritten.documents:,} documents of their "
        f"own with {rewritten.tokens:,} tokens ({rewritten.tokens / max(total, 1):.1%} of all); history stored again: "
        f"{rewritten.history_tokens:,} tokens ({rewritten.history_tokens / max(total, 1):.1%})"
    ]


def _duplicates(report: PromptsReport) -> list[str]:
    found, lines = report.duplicates, []
    if found.same_question:
        lines.append(
            f"same question: {found.same_question:,} {report.source} ask what an earlier one asks; {found.questions:,} different "
            f"questions, at most {found.largest:,} {report.source} with the same one, always on one side of the split"
        )
    if found.dropped:
        lines.append(f"left out: {found.dropped:,} {report.source} that become the same tokens as another one")
    if found.kept:
        lines.append(f"kept: {found.kept:,} {report.source} that become the same tokens as another one; they are split by name")
    return lines


def _left_out(report: PromptsReport) -> list[str]:
    lines = [f"cut: {report.documents_cut:,} {report.source} into {report.windows_cut:,} windows"]
    if report.windows_unsupervised:
        lines.append(f"left out: {report.windows_unsupervised:,} windows without a token that counts in the loss")
    if report.answers_left_out:
        lines.append(f"left out of the loss: {report.answers_left_out:,} answers that the chat template does not show as generated")
    if report.beyond_max_train_tokens:
        lines.append(f"left out: {report.beyond_max_train_tokens:,} {report.source} beyond prompts.max_train_tokens")
    for refusals in report.refused:
        more = ", ..." if refusals.count > len(refusals.first) else ""
        lines.append(f"refused: {refusals.count:,} ({refusals.reason}): {', '.join(refusals.first)}{more}")
    return lines
