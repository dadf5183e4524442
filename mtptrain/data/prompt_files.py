"""The files of prompts, which mtptrain prompts writes and extraction, validation and acceptance read.

`run_dir/prompts/` holds `train.safetensors` and `validation.safetensors`, each with `input_ids` i32[N], `loss_mask`
u8[N], `document_offsets` i64[D+1] and `document_ids` i64[D] for N tokens and D documents. `documents.jsonl` names each
document. `manifest.json` records the tokenizer and the number of documents and tokens.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load_file

from mtptrain.data.identity import TokenizerIdentity
from mtptrain.stage_dir import require
from mtptrain.utils.files import read_json, read_manifest, save_tensors, write_sealed, write_text

SCHEMA_VERSION = 2
DOCUMENTS_FILE, REPORT_FILE = "documents.jsonl", "report.json"
AGAIN = "run mtptrain prompts again"
_SHOWN = 3


class Split(StrEnum):
    train = "train"
    validation = "validation"

    @property
    def filename(self) -> str:
        return f"{self}.safetensors"


@dataclass(frozen=True)
class Documents:
    """Token ids and loss masks of many documents, each in one array without padding."""

    input_ids: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.uint8]  # [N], 1 for supervised tokens
    document_offsets: NDArray[np.int64]  # [D+1]
    document_ids: NDArray[np.int64]  # [D], index of a line in documents.jsonl

    @staticmethod
    def from_list(documents: Sequence[tuple[int, ArrayLike, ArrayLike]]) -> "Documents":
        """Concatenates (document id, token ids, loss mask) triples."""
        ids = [np.asarray(token_ids, np.int32) for _, token_ids, _ in documents]
        masks = [np.asarray(mask, np.uint8) for _, _, mask in documents]
        return Documents(
            input_ids=np.concatenate([np.empty(0, np.int32), *ids]),
            loss_mask=np.concatenate([np.empty(0, np.uint8), *masks]),
            document_offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
            document_ids=np.array([document_id for document_id, _, _ in documents], np.int64),
        )

    def __len__(self) -> int:
        return len(self.document_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.document_offsets)

    def token_ids(self, index: int) -> NDArray[np.int32]:
        return self.input_ids[self.document_offsets[index] : self.document_offsets[index + 1]]

    def mask(self, index: int) -> NDArray[np.uint8]:
        return self.loss_mask[self.document_offsets[index] : self.document_offsets[index + 1]]

    def save(self, path: Path) -> None:
        save_tensors(path, {name: torch.from_numpy(array) for name, array in vars(self).items()})

    @staticmethod
    def load(path: Path) -> "Documents":
        """Read a split, of which `require_prompts` has checked every byte."""
        return Documents(**load_file(path))


def unused_token(splits: Iterable[Documents], vocab_size: int) -> int | None:
    """Returns the highest id of the vocabulary that no document has; None if they have all."""
    is_used = np.zeros(vocab_size, bool)
    for documents in splits:
        is_used[documents.input_ids] = True
    return max(np.flatnonzero(~is_used).tolist(), default=None)


def training_data_facts(documents: Documents) -> dict[str, object]:
    """Returns what serving depends on in documents: their sizes, and the ids that most often end an answer."""
    following = np.append(documents.loss_mask[1:], 0)
    following[documents.document_offsets[1:] - 1] = 0
    ends = Counter(documents.input_ids[(documents.loss_mask > 0) & (following == 0)].tolist())
    return {
        "documents": len(documents),
        "tokens": len(documents.input_ids),
        "supervised_tokens": int(documents.loss_mask.sum()),
        "longest_document_tokens": int(documents.lengths.max(initial=0)),
        "answers_end_with": {str(token): count for token, count in ends.most_common(3)},
    }


@dataclass(frozen=True)
class DocumentEntry:
    """A line of documents.jsonl."""

    id: int
    name: str
    """Name of the file or conversation; all its windows and turns share it."""
    split: Split
    tokens: int
    """Number of tokens in this window."""
    window: int
    """Index of this window of the file or conversation, from 0."""
    turn: int
    """0 for the main document. Some chat templates render a message differently once the conversation continues. Such a
    message is the end of a separate document, and this is that message's number, from 1."""
    group: str
    """Name of the group of files or conversations that share a split."""

    @staticmethod
    def write_all(directory: Path, entries: Iterable["DocumentEntry"]) -> None:
        write_text(directory / DOCUMENTS_FILE, "".join(json.dumps(asdict(entry)) + "\n" for entry in entries))

    @staticmethod
    def read_all(directory: Path) -> list["DocumentEntry"]:
        """Reads all entries, after `require_prompts` has checked every byte."""
        lines = map(json.loads, (directory / DOCUMENTS_FILE).read_bytes().splitlines())
        return [DocumentEntry(**{**line, "split": Split(line["split"])}) for line in lines]


@dataclass(frozen=True)
class PromptsManifest:
    """The tokenizer of the prompts, and the number of documents and tokens in each split."""

    schema_version: int
    tokenizer: TokenizerIdentity
    vocab_size: int
    max_document_tokens: int
    train_documents: int
    train_tokens: int
    validation_documents: int
    validation_tokens: int
    unused_token: int | None = None
    """That of both splits; None in manifests of earlier versions."""

    def write(self, directory: Path) -> None:
        files = (*(split.filename for split in Split), DOCUMENTS_FILE)
        write_sealed(directory / "manifest.json", asdict(self), files)

    @staticmethod
    def read(directory: Path, files: Collection[str] = ()) -> "PromptsManifest":
        """Read the manifest, and check the bytes of these files of the directory."""
        path = directory / "manifest.json"
        return read_manifest(PromptsManifest, path, "mtptrain prompts", AGAIN, SCHEMA_VERSION, files)


def require_prompts(directory: Path, name: str) -> Path:
    """Returns a file of finished prompts, after checking that all its bytes are as they were written."""
    require(directory / "manifest.json", "mtptrain prompts")
    PromptsManifest.read(directory, [name])
    return directory / name


@dataclass(frozen=True)
class Refusals:
    """Items left out for one reason."""

    reason: str
    count: int
    first: list[str]
    """Locations of the first few."""


def group_refusals(refused: Mapping[str, str]) -> list[Refusals]:
    """Counts refusals, given by location, by reason: the most frequent first, with the first few locations of each."""
    by_reason: dict[str, list[str]] = {}
    for place, reason in refused.items():
        by_reason.setdefault(reason, []).append(place)
    groups = [Refusals(reason, len(places), places[:_SHOWN]) for reason, places in by_reason.items()]
    return sorted(groups, key=lambda group: -group.count)


def describe_refusals(num_items: int, groups: Sequence[Refusals]) -> str:
    """Returns how many items were refused, the most frequent reasons, and the first place of the first of these."""
    found = [f"{group.count:,} ({group.reason})" for group in groups[:_SHOWN]]
    found += [f"the first is {group.first[0]}" for group in groups[:1]]
    refused = sum(group.count for group in groups)
    return f"{refused:,} of {num_items:,} items were refused{': ' * bool(found)}{', '.join(found)}"


def refusals_of(directory: Path) -> str:
    """Returns what `describe_refusals` says of finished prompts."""
    report = read_json(directory / REPORT_FILE, AGAIN, ["counts", "refused"])
    return describe_refusals(report["counts"]["items"], [Refusals(**group) for group in report["refused"]])


def name_hash(name: str) -> float:
    """Returns a number in [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def is_held_out(name: str, fraction: float) -> bool:
    """Returns whether the files or conversations of this cluster are held out, as about `fraction` of all names are."""
    return name_hash(name) < fraction
