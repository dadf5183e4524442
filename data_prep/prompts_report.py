"""The report of stage 1, printed and stored as report.json: what was written, and what was left out and why.

Its items are the files, the conversations or the rows of tokens that the source holds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from mtptrain.data.prompt_files import Refusals, Split

_WRITTEN = {
    "documents": "documents: whole items, windows of longer ones, and those of rewritten answers",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
    "longest": "tokens of the longest document",
}
COUNTS = {
    **{f"{split}_{name}": f"{split}: {words}" for split in Split for name, words in _WRITTEN.items()},
    "items": "items (files, conversations or rows of tokens) of the source",
    "questions": "different questions; all items with the same one are in one split",
    "near_duplicates": "different questions that nearly repeat another one; these too are in one split",
    "rewritten_answers": "assistant turns that the chat template changes once later turns follow, and that are also "
    "stored as generated, in documents of their own",
    "rewritten_tokens": "tokens of these documents",
    "joined": "rows of traces that go on from another row, or repeat it: with that row, they are one item",
    "copies": "items left out, because another one has the same tokens",
    "items_cut": "items cut into windows, because they are longer than prompts.max_document_tokens",
    "windows_unsupervised": "windows left out, because they have no supervised token",
    "answers_left_out": "assistant turns left out of the loss, because the template does not render them as generated",
    "answers_untrained": "assistant turns left out of the loss, because they are not to be trained",
    "answers_endless": "assistant turns without a supervised end, because the chat template writes nothing after the "
    "last one; correct the template, or the head never learns to draft the end",
    "without_drafts": "documents whose answers are too short to draft a token",
    "beyond_max_train_tokens": "items left out, in whole or in part, because of prompts.max_train_tokens",
}
"""The names of counts, over the items that were read before the training split was full, and what each counts."""


@dataclass
class PromptsReport:
    source: str
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers by their names in `COUNTS`."""
    passed_over: list[str] = field(default_factory=list)
    """Names of columns and message keys that are not read."""
    refused: list[Refusals] = field(default_factory=list)


def print_counts(
    title: str, counts: Mapping[str, int], words: Mapping[str, str], refused: Sequence[Refusals], *lines: str
) -> None:
    """Print a table of the counts that are not zero, further lines, and a line for each reason to leave items out."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name in words:
        if counts.get(name):
            table.add_row(f"{counts[name]:,}", words[name])
    console = Console(markup=False, highlight=False)
    console.print(table)
    for group in refused:
        more = ", ..." if group.count > len(group.first) else ""
        lines = (*lines, f"{group.count:,} left out or ended early: {group.reason}: {', '.join(group.first)}{more}")
    for line in lines:
        console.print(line, soft_wrap=True)
