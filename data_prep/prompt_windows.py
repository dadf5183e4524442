"""Cuts tokenized items into windows, assigns each to training or validation, and counts what is left out.

An item is a file, a conversation or a row of tokens. A conversation may need several encodings.
"""

import hashlib
from dataclasses import replace

from tqdm import tqdm

from mtptrain.config import PromptsConfig
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split, is_held_out, name_hash
from mtptrain.utils.errors import UserError

from .prompt_sources import Source
from .prompts_report import PromptsReport
from .renderings import EncodedItem, Encoding

_BATCH = 64
"""Number of items per call of the tokenizer. Each call uses all cores."""


class Collector:
    """Cuts and splits items in the order they are added, and counts them in the report."""

    def __init__(self, prompts: PromptsConfig, vocab_size: int, report: PromptsReport) -> None:
        self.windows: list[tuple[DocumentEntry, Encoding]] = []
        """The documents of the output, and the tokens of each. An id is its index among them."""
        self.tokens_read = 0
        self.is_full = False
        """Whether a window would have exceeded prompts.max_train_tokens. If so, the training split is closed."""
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._report = report
        self._train_tokens = 0
        self._seen: set[bytes] = set()

    def add(self, name: str, group: str, cluster: str, location: str, item: EncodedItem) -> None:
        """Add the windows of an item that fit within prompts.max_train_tokens.

        The limit does not apply to validation windows.

        An item with the same tokens and loss mask as an earlier one is left out. Held-out items must be added first,
        so that no copy of them is trained on.

        Raises:
            UserError: a token id is beyond the model's vocabulary.
        """
        report = self._report
        for encoding in item.encodings:
            check_vocabulary(encoding, self._vocab_size, location)
        if self._is_copy(item):
            report.duplicates.dropped += 1
            return
        split = Split.validation if is_held_out(cluster, self._prompts.validation_fraction) else Split.train
        if split is Split.train and self.is_full:
            report.beyond_max_train_tokens += 1
            return
        report.answers_left_out += item.answers_left_out
        report.answers_untrained += item.answers_untrained
        report.answers_inserted += item.answers_inserted
        is_cut, is_whole = False, True
        for encoding in item.encodings:
            windows = cut(encoding, self._prompts.max_document_tokens)
            self.tokens_read += len(encoding.input_ids)
            if len(windows) > 1:
                is_cut = True
                report.windows_cut += len(windows)
            if encoding.turn:
                report.rewritten.answers += encoding.answers
            for number, window in enumerate(windows):
                if not window.loss_mask.any():
                    report.windows_unsupervised += 1
                elif split is Split.validation or self._fits(len(window.input_ids)):
                    tokens = len(window.input_ids)
                    entry = DocumentEntry(len(self.windows), name, split, tokens, number, encoding.turn, group)
                    self.windows.append((entry, window))
                    if encoding.turn:
                        report.rewritten.add(window.loss_mask)
                else:
                    is_whole = False
        report.items_cut += is_cut
        report.beyond_max_train_tokens += not is_whole

    def _is_copy(self, item: EncodedItem) -> bool:
        """Remembers an item, and returns whether an earlier one has the same tokens and loss mask."""
        digest = hashlib.blake2b(digest_size=16)
        for encoding in item.encodings:
            digest.update(
                len(encoding.input_ids).to_bytes(8) + encoding.input_ids.tobytes() + encoding.loss_mask.tobytes()
            )
        is_copy = digest.digest() in self._seen
        self._seen.add(digest.digest())
        return is_copy

    def _fits(self, tokens: int) -> bool:
        """Counts the tokens of a training window and returns True, or closes the split if they exceed the limit."""
        limit = self._prompts.max_train_tokens
        # A full split stays full even if a shorter window would fit, so that raising the limit only appends windows.
        self.is_full = self.is_full or 0 < limit < self._train_tokens + tokens
        self._train_tokens += 0 if self.is_full else tokens
        return not self.is_full

    def documents(self, split: Split) -> Documents:
        return Documents.from_list(
            [(entry.id, each.input_ids, each.loss_mask) for entry, each in self.windows if entry.split is split]
        )


def collect_windows(
    source: Source, prompts: PromptsConfig, vocab_size: int, report: PromptsReport
) -> tuple[Collector, dict[str, str]]:
    """Tokenize, cut and split items until the training split is full, in the order of their clusters' hashes.

    A cluster is a file, all conversations with the same or nearly the same question, or all rows of tokens with the
    same prompt. Held-out clusters have the smallest hashes. The validation split is therefore complete before the
    training split can be full, and a file that has copies in both splits is kept in the validation split.

    Args:
        source: the items.
        prompts: the settings.
        vocab_size: size of the target's vocabulary.
        report: counts what is left out.

    Returns:
        The windows, and why items were refused, by location.
    """
    names, groups, clusters = source.names, source.groups, source.clusters
    order = sorted(range(len(names)), key=lambda i: (name_hash(clusters[i]), clusters[i], groups[i], names[i], i))
    collector, refused = Collector(prompts, vocab_size, report), dict(source.refused)
    with tqdm(total=len(order), desc="prompts", unit="item") as bar:
        for start in range(0, len(order), _BATCH):
            if collector.is_full:
                report.beyond_max_train_tokens += len(order) - start
                break
            batch = order[start : start + _BATCH]
            for index, item in zip(batch, source.encode(batch), strict=True):
                if isinstance(item, str):
                    refused[source.location(index)] = item
                else:
                    collector.add(names[index], groups[index], clusters[index], source.location(index), item)
            bar.update(len(batch))
            bar.set_postfix_str(
                f"{collector.tokens_read / max(bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s", refresh=False
            )
    return collector, refused


def cut(encoding: Encoding, max_tokens: int) -> list[Encoding]:
    """Returns consecutive windows of at most `max_tokens`, without overlap."""
    ids, mask = encoding.input_ids, encoding.loss_mask
    starts = range(0, len(ids), max_tokens)
    return [replace(encoding, input_ids=ids[i : i + max_tokens], loss_mask=mask[i : i + max_tokens]) for i in starts]


def check_vocabulary(encoding: Encoding, vocab_size: int, location: str) -> None:
    highest = int(encoding.input_ids.max(initial=0))
    if highest >= vocab_size:
        raise UserError(
            f"target.path: token ids must be below the model's vocab_size {vocab_size}, but {location} has {highest}; "
            "the tokenizer, or the data of prompts.source=tokens, belongs to another model: correct target.path, its "
            "files or prompts.paths"
        )
