"""Cuts tokenized items into windows, assigns each to training or validation, and counts what is left out.

An item is a file, a conversation or a row of tokens. A conversation may need several encodings.
"""

import hashlib
from collections.abc import Sequence

from mtptrain.config import PromptsConfig
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split, is_held_out, name_hash
from mtptrain.utils.errors import UserError
from mtptrain.utils.progress import ProgressBar

from .assistant_masks import Encoding
from .prompt_sources import Source

_BATCH = 64
"""Number of items per call of the tokenizer. Each call uses all cores."""


class Collector:
    """Cuts, splits and counts items in the order they are added."""

    def __init__(self, prompts: PromptsConfig, vocab_size: int) -> None:
        self.windows: list[tuple[DocumentEntry, Encoding]] = []
        """The documents of the output, and the tokens of each. An id is its index among them."""
        self.refused: dict[str, str] = {}
        # `PromptsReport` describes these counts; `answers_rewritten` is its `rewritten.answers`.
        self.items_cut = 0
        self.windows_cut = 0
        self.windows_unsupervised = 0
        self.answers_rewritten = 0
        self.answers_left_out = 0
        self.answers_untrained = 0
        self.answers_inserted = 0
        self.beyond_max_train_tokens = 0
        self.copies = 0
        """Number of items with the same tokens and loss mask as an earlier one."""
        self.tokens_read = 0
        self.is_full = False
        """Whether a window would have exceeded prompts.max_train_tokens. If so, the training split is closed."""
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._train_tokens = 0
        self._seen: set[bytes] = set()

    def add(self, name: str, group: str, cluster: str, location: str, encodings: Sequence[Encoding]) -> None:
        """Add the windows of an item that fit within prompts.max_train_tokens.

        The limit does not apply to validation windows.

        An item with the same tokens and loss mask as an earlier one is left out. Held-out items must be added first,
        so that no copy of them is trained on.

        Raises:
            UserError: a token id is beyond the model's vocabulary.
        """
        for encoding in encodings:
            check_vocabulary(encoding, self._vocab_size, location)
        if self._is_copy(encodings):
            return
        split = Split.validation if is_held_out(cluster, self._prompts.validation_fraction) else Split.train
        if split is Split.train and self.is_full:
            self.beyond_max_train_tokens += 1
            return
        self.items_cut += any(len(encoding.input_ids) > self._prompts.max_document_tokens for encoding in encodings)
        is_whole = True
        for encoding in encodings:
            for number, window in self._windows(encoding):
                tokens = len(window.input_ids)
                if split is Split.validation or self._fits(tokens):
                    entry = DocumentEntry(len(self.windows), name, split, tokens, number, encoding.turn, group)
                    self.windows.append((entry, window))
                else:
                    is_whole = False
        self.beyond_max_train_tokens += not is_whole

    def _is_copy(self, encodings: Sequence[Encoding]) -> bool:
        """Remembers an item, and counts it and returns True if an earlier one has the same tokens and loss mask."""
        digest = hashlib.blake2b(digest_size=16)
        for encoding in encodings:
            digest.update(
                len(encoding.input_ids).to_bytes(8) + encoding.input_ids.tobytes() + encoding.loss_mask.tobytes()
            )
        is_copy = digest.digest() in self._seen
        self._seen.add(digest.digest())
        self.copies += is_copy
        return is_copy

    def _windows(self, encoding: Encoding) -> list[tuple[int, Encoding]]:
        """Cut an encoding, count its windows, and return those with a supervised token, with their indices from 0."""
        parts = cut(encoding, self._prompts.max_document_tokens)
        windows = [(number, part) for number, part in enumerate(parts) if part.loss_mask.any()]
        self.tokens_read += len(encoding.input_ids)
        self.windows_cut += len(parts) if len(parts) > 1 else 0
        self.windows_unsupervised += len(parts) - len(windows)
        self.answers_rewritten += encoding.answers if encoding.turn else 0
        self.answers_left_out += encoding.answers_left_out
        self.answers_untrained += encoding.answers_untrained
        self.answers_inserted += encoding.answers_inserted
        return windows

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


def collect_windows(source: Source, prompts: PromptsConfig, vocab_size: int) -> Collector:
    """Tokenize, cut and split items until the training split is full, in the order of their clusters' hashes.

    A cluster is a file, all conversations with the same or nearly the same question, or all rows of tokens with the
    same prompt. Held-out clusters have the smallest hashes. The validation split is therefore complete before the
    training split can be full, and a file that has copies in both splits is kept in the validation split.
    """
    names, groups, clusters = source.names, source.groups, source.clusters
    order = sorted(range(len(names)), key=lambda i: (name_hash(clusters[i]), clusters[i], groups[i], names[i], i))
    collector = Collector(prompts, vocab_size)
    collector.refused.update(source.refused)
    with ProgressBar(total=len(order), desc="prompts", unit="item") as bar:
        for start in range(0, len(order), _BATCH):
            if collector.is_full:
                collector.beyond_max_train_tokens += len(order) - start
                break
            batch = order[start : start + _BATCH]
            _add_batch(collector, source, batch)
            bar.update(len(batch))
            bar.set_postfix_str(
                f"{collector.tokens_read / max(bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s", refresh=False
            )
    return collector


def _add_batch(collector: Collector, source: Source, batch: Sequence[int]) -> None:
    for index, encodings in zip(batch, source.encode(batch), strict=True):
        if isinstance(encodings, str):
            collector.refused[source.location(index)] = encodings
        else:
            name, group, cluster = source.names[index], source.groups[index], source.clusters[index]
            collector.add(name, group, cluster, source.location(index), encodings)


def cut(encoding: Encoding, max_tokens: int) -> list[Encoding]:
    """Returns consecutive windows of at most `max_tokens`, without overlap."""
    starts = range(0, len(encoding.input_ids), max_tokens)
    return [Encoding(encoding.input_ids[i : i + max_tokens], encoding.loss_mask[i : i + max_tokens]) for i in starts]


def check_vocabulary(encoding: Encoding, vocab_size: int, location: str) -> None:
    highest = int(encoding.input_ids.max(initial=0))
    if highest >= vocab_size:
        raise UserError(
            f"target.path: token ids must be below the model's vocab_size {vocab_size}, but {location} has {highest}; "
            "the tokenizer, or the data of prompts.source=tokens, belongs to another model: correct target.path, its "
            "files or prompts.paths"
        )
