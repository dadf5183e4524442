"""Stage 1: tokenize files or conversations, and write token ids and loss masks to `run_dir/prompts/`.

Reads the target's tokenizer and `prompts.paths`, or `run_dir/responses/` with `prompts.source=responses`; writes
train.safetensors, validation.safetensors, documents.jsonl, report.json and, last, manifest.json.

    mtptrain prompts recipe=quickstart
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PipelineConfig, PromptsConfig, PromptSource
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import (
    REPORT_FILE,
    SCHEMA_VERSION,
    DocumentEntry,
    Documents,
    PromptsManifest,
    Split,
    describe_refusals,
    group_refusals,
    is_held_out,
    name_hash,
    unused_token,
)
from mtptrain.data.tool_calls import TOOL_NOTES
from mtptrain.engines.table import engine_of
from mtptrain.run_dir import Run
from mtptrain.stage_dir import StageDir
from mtptrain.target.served_chats import chats_elsewhere
from mtptrain.target.served_tokens import texts_elsewhere
from mtptrain.training.batches import draft_spans
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import write_json
from mtptrain.utils.progress import ProgressBar

from .conversations import Source
from .prompt_sources import read_source
from .prompts_report import COUNTS, PromptsReport, print_counts
from .renderings import EncodedItem, Encoding

_BATCH = 64
"""Number of items per call of the tokenizer. Each call uses all cores."""


def main(config: PipelineConfig) -> None:
    with StageDir(config.stage_dir("prompts")).writing():
        report = prepare_prompts(Run(config))
    names = ", ".join(report.passed_over)
    passed_over = [f"columns and keys that are passed over, because they are not read: {names}"] if names else []
    print_counts(f"prompts from {report.source}", report.counts, COUNTS, report.refused, *passed_over)
    print(f"written to {config.stage_dir('prompts')}")


def prepare_prompts(run: Run) -> PromptsReport:
    prompts, vocab_size, tokenizer = run.config.prompts, int(run.target.config.vocab_size), run.target.tokenizer
    source, clusters = read_source(prompts, run.target, run.stage_dir("responses"))
    report = PromptsReport(prompts.source, passed_over=sorted(source.passed_over - TOOL_NOTES))
    counts = report.counts
    counts["items"] = len(source.names) + len(source.refused)
    counts["joined"] = source.num_joined
    counts["questions"] = len(set(source.groups))
    members = Counter(dict(zip(source.groups, clusters, strict=True)).values())
    counts["near_duplicates"] = sum(count for count in members.values() if count > 1)

    windows = Windows(prompts.validation_fraction, prompts.max_document_tokens, prompts.max_train_tokens, counts)
    report.refused = group_refusals(windows.add_all(source, clusters, tokenizer, vocab_size))
    splits = {split: windows.documents(split) for split in Split}
    for split, documents in splits.items():
        counts[f"{split}_documents"], counts[f"{split}_tokens"] = len(documents), len(documents.input_ids)
        counts[f"{split}_supervised_tokens"] = int(documents.loss_mask.sum())
        counts[f"{split}_longest"] = int(documents.lengths.max(initial=0))
    check_splits(splits, report, prompts)
    beginnings = [encoding.input_ids for entry, encoding in windows.written if entry.window == 0]
    differences = chats_elsewhere(run.target) if prompts.source.is_chat else texts_elsewhere(beginnings, run.target)
    for difference in differences if prompts.source is not PromptSource.responses else ():  # responses has said it
        warn(difference)
    for each in sorted(TOOL_NOTES & source.passed_over):
        warn(each)
    if note := engine_of(run.config.export.engine).ends_note(run.target):
        print(note)

    stage_dir = run.stage_dir("prompts")
    StageDir(stage_dir).record(run.config, "manifest.json")
    for split, documents in splits.items():
        documents.save(stage_dir / split.filename)
    DocumentEntry.write_all(stage_dir, [entry for entry, _ in windows.written])
    write_json(stage_dir / REPORT_FILE, asdict(report) | {"counts": {name: counts[name] for name in COUNTS}})
    sizes = [counts[f"{split}_{name}"] for split in Split for name in ("documents", "tokens")]
    identity = TokenizerIdentity.of(tokenizer, run.target.template_kwargs_json)
    manifest = PromptsManifest(SCHEMA_VERSION, identity, vocab_size, prompts.max_document_tokens, *sizes)
    replace(manifest, unused_token=unused_token(splits.values(), vocab_size)).write(stage_dir)
    return report


@dataclass
class Windows:
    """Cuts encoded items into windows, assigns each to a split, and counts what is left out."""

    validation_fraction: float
    max_document_tokens: int
    max_train_tokens: int
    counts: Counter[str]
    written: list[tuple[DocumentEntry, Encoding]] = field(default_factory=list)
    """The documents of the output, and the tokens of each. An id is its index among them."""
    _is_full: bool = False
    """Whether a window would have exceeded `max_train_tokens`. If so, the training split is closed."""
    _train_tokens: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def add_all(
        self, source: Source, clusters: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocab_size: int
    ) -> dict[str, str]:
        """Tokenize, cut and split items until the training split is full. Returns why items were refused, by location.

        Items are taken in the order of the hashes of their clusters, and held-out ones have the smallest. The
        validation split is therefore complete before the training split can be full, and has the one copy of a file
        that both splits would have.
        """
        keys = list(zip(map(name_hash, clusters), clusters, source.groups, source.names, strict=True))
        order = sorted(range(len(keys)), key=lambda index: (keys[index], index))
        refused = dict(source.refused)
        with ProgressBar(total=len(order), desc="prompts", unit="item") as bar:
            for start in range(0, len(order), _BATCH):
                if self._is_full:
                    self.counts["beyond_max_train_tokens"] += len(order) - start
                    break
                batch = order[start : start + _BATCH]
                for index, item in zip(batch, source.encode(tokenizer, batch), strict=True):
                    if isinstance(item, str):
                        refused[source.location(index)] = item
                    else:
                        check_vocabulary(item, vocab_size, source.location(index))
                        self._add(source.names[index], source.groups[index], clusters[index], item)
                bar.update(len(batch))
        return refused

    def documents(self, split: Split) -> Documents:
        return Documents.from_list(
            [(entry.id, each.input_ids, each.loss_mask) for entry, each in self.written if entry.split is split]
        )

    def _add(self, name: str, group: str, cluster: str, item: EncodedItem) -> None:
        """Add the windows of an item that is no copy of an earlier one, as far as the training split has room."""
        counts = self.counts
        if self._is_copy(item):
            counts["copies"] += 1
            return
        split = Split.validation if is_held_out(cluster, self.validation_fraction) else Split.train
        if split is Split.train and self._is_full:
            counts["beyond_max_train_tokens"] += 1
            return
        counts.update(item.counts)
        counts["items_cut"] += any(len(each.input_ids) > self.max_document_tokens for each in item.encodings)
        is_whole = True
        for encoding in item.encodings:
            if encoding.turn:
                counts["rewritten_answers"] += encoding.answers
            for number, window in enumerate(cut(encoding, self.max_document_tokens)):
                tokens = len(window.input_ids)
                if not window.loss_mask.any():
                    counts["windows_unsupervised"] += 1
                elif split is Split.validation or self._fits(tokens):
                    entry = DocumentEntry(len(self.written), name, split, tokens, number, encoding.turn, group)
                    self.written.append((entry, window))
                    counts["without_drafts"] += not has_drafts(window.loss_mask)
                    counts["rewritten_tokens"] += tokens if encoding.turn else 0
                else:
                    is_whole = False
        counts["beyond_max_train_tokens"] += not is_whole

    def _is_copy(self, item: EncodedItem) -> bool:
        """Remembers an item, and returns whether an earlier one has the same tokens and loss mask."""
        digest = hashlib.blake2b(digest_size=16)
        for each in item.encodings:
            digest.update(len(each.input_ids).to_bytes(8) + each.input_ids.tobytes() + each.loss_mask.tobytes())
        is_copy = digest.digest() in self._seen
        self._seen.add(digest.digest())
        return is_copy

    def _fits(self, tokens: int) -> bool:
        """Counts the tokens of a training window and returns True, or closes the split if they exceed the limit."""
        # A full split stays full even if a shorter window would fit, so that raising the limit only appends windows.
        self._is_full = self._is_full or 0 < self.max_train_tokens < self._train_tokens + tokens
        self._train_tokens += 0 if self._is_full else tokens
        return not self._is_full


def cut(encoding: Encoding, max_tokens: int) -> list[Encoding]:
    ids, mask = encoding.input_ids, encoding.loss_mask
    starts = range(0, len(ids), max_tokens)
    return [replace(encoding, input_ids=ids[i : i + max_tokens], loss_mask=mask[i : i + max_tokens]) for i in starts]


def has_drafts(mask: NDArray[np.uint8]) -> bool:
    """Returns whether a document with this loss mask [S] has a draft position: two generated tokens after a token."""
    return len(draft_spans(mask)[0]) > 0


def check_vocabulary(item: EncodedItem, vocab_size: int, location: str) -> None:
    highest = max(int(encoding.input_ids.max(initial=0)) for encoding in item.encodings)
    if highest >= vocab_size:
        raise UserError(
            f"target.path: token ids must be below the model's vocab_size {vocab_size}, but {location} has {highest}; "
            "the tokenizer, or the data of prompts.source=tokens, belongs to another model: correct target.path, its "
            "files or prompts.paths"
        )


def check_splits(splits: Mapping[Split, Documents], report: PromptsReport, prompts: PromptsConfig) -> None:
    """Refuse prompts of which a split is empty, or that train nothing."""
    empty = [f"{split} holds none" for split, documents in splits.items() if not len(documents)]
    train = splits[Split.train]
    if len(train) and not any(has_drafts(train.mask(i)) for i in range(len(train))):
        empty.append(f"train holds {len(train):,} in which no token can be drafted")
    if empty == ["validation holds none"] and not report.refused and not report.counts["windows_unsupervised"]:
        raise UserError(
            "prompts.validation_fraction: must hold out at least 2 files or different questions, but holds out none of "
            f"{report.counts['questions']:,}; raise it ({prompts.validation_fraction}), or add data to prompts.paths"
        )
    if empty:
        names = ("pattern", "validation_fraction", "max_train_tokens", "max_document_tokens")
        raise UserError(
            f"prompts.paths: {describe_refusals(report.counts['items'], report.refused)}; each split must hold a "
            "document, with an answer after exactly the prompt that a server sends if it is a conversation, and train "
            f"one in which two generated tokens follow another token, but {' and '.join(empty)}, of "
            f"{report.counts['questions']:,} different questions or files, with "
            f"{report.counts['windows_unsupervised']} windows without a supervised token; correct prompts.paths, "
            f"{', '.join(f'prompts.{name} ({getattr(prompts, name)})' for name in names)}, the data or the chat "
            "template, or let the target answer (mtptrain responses, prompts.source=responses)"
        )
