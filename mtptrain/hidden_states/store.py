"""Defines the format of stage 2's output and reads it; mtptrain/hidden_states/writer.py writes it.

`run_dir/hidden_states/` holds `shard_00000.safetensors`, ... and `manifest.json`, which is written last and identifies
the target, prompts and settings of the states. A shard of `documents` documents and N tokens holds `input_ids` i32[N],
`loss_mask` u8[N], `document_offsets` i64[documents + 1], `document_ids` i64[documents], `document_checksums`
u8[documents, 16], `hidden_states` bf16[N, H] (after the last decoder layer, before the final norm) and, for heads that
capture layers, `aux_hidden_states` bf16[N, L, H]. With store dtype fp8, both are e4m3; with fp8_aux, only
`aux_hidden_states` is. `hidden_states_scales` f32[N] and `aux_hidden_states_scales` f32[N, L] hold the scales of e4m3
values (`fp8.py`). While the store is being filled, it holds `plan.json` instead of a manifest, and a record
`shard_*.json` for each finished shard. Both are deleted once the manifest is written.

Three checks detect damage. Mapping a shard compares its length, and the checksum of its header, tables and loss mask,
with the manifest. Reading a document compares its checksum. `mtptrain verify` compares the sha256 of every shard.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from mtptrain.data.identity import StoreIdentity, refuse_other
from mtptrain.hidden_states.shard_format import CHECKED, CHECKSUMS, document_checksum, index_checksum
from mtptrain.utils.distributed import Ranks, StopSignal
from mtptrain.utils.errors import StageMissing, UserError
from mtptrain.utils.files import file_sha256, read_manifest
from mtptrain.utils.progress import ProgressBar

SCHEMA_VERSION = 2
"""Version 2 added a checksum per document, and one per shard for its header, tables and loss mask."""
MANIFEST, PLAN = "manifest.json", "plan.json"
OPENING_THREADS = 8
"""Number of shards opened at a time. On a network file system, opening one takes milliseconds."""
RESTART = "delete {} and run mtptrain hidden-states again"
REMEDY = "delete the shard's file and run mtptrain hidden-states, which recomputes only this shard"


@dataclass(frozen=True)
class ShardRecord:
    """The manifest's entry for a shard, and the contents of its `shard_*.json` while the store is unfinished."""

    file: str
    num_documents: int
    num_tokens: int
    num_supervised_tokens: int
    """Number of tokens whose loss mask is set."""
    num_bytes: int
    sha256: str
    index_bytes: int
    """Size of the header and the document tables at the start of the file."""
    index_checksum: str
    """XXH3-128 of the header and tables, and of the loss mask at the end of the file."""


@dataclass(frozen=True)
class StoreManifest:
    """The contents of a finished store. It has no timestamps, hosts or ranks, so equal stores have equal manifests."""

    schema_version: int
    identity: StoreIdentity
    shard_tokens: int
    """A shard ends with the document that reaches this many tokens."""
    hidden_size: int
    num_documents: int
    num_tokens: int
    num_supervised_tokens: int
    shards: tuple[ShardRecord, ...]

    @staticmethod
    def read(directory: Path) -> "StoreManifest":
        """Read `directory`/manifest.json. Raises StageMissing if the store does not exist or is unfinished."""
        path = directory / MANIFEST
        if not path.exists():
            state = "the extraction is unfinished" if (directory / PLAN).exists() else "it does not"
            raise StageMissing(
                f"{path}: must exist, but {state}; run mtptrain hidden-states with the same recipe and run_dir"
            )
        return read_manifest(
            StoreManifest, path, StoreIdentity.program, RESTART.format(directory), version=SCHEMA_VERSION
        )


@dataclass(frozen=True)
class StorePlan:
    """The contents of `plan.json`, which an unfinished store has instead of the manifest."""

    identity: StoreIdentity
    shard_tokens: int
    """A shard ends with the document that reaches this many tokens."""

    @staticmethod
    def read(directory: Path) -> "StorePlan":
        """Read `directory`/plan.json. Raises UserError if it is damaged."""
        return read_manifest(StorePlan, directory / PLAN, StoreIdentity.program, RESTART.format(directory))


@dataclass(frozen=True)
class StoredDocument:
    """A document as views into a memory-mapped shard. Do not write to them."""

    document_id: int
    """Index of the document's line in stage 1's documents.jsonl, from 0."""
    input_ids: torch.Tensor  # i32[n]
    loss_mask: torch.Tensor  # u8[n]
    hidden_states: torch.Tensor  # bf16 or e4m3 [n, H], before the final norm
    aux_hidden_states: torch.Tensor | None  # bf16 or e4m3 [n, L, H]
    hidden_states_scales: torch.Tensor | None = None  # f32[n], if e4m3
    aux_hidden_states_scales: torch.Tensor | None = None  # f32[n, L], if e4m3


class HiddenStates(ABC):
    """Hidden states of documents, in shards on disk. A shard is mapped when something in it is first read."""

    more_advice = ""
    """Added to what an error about a damaged document says to do."""
    order: NDArray[np.int64] | None = None
    """Document indices of the only epoch [documents]; None if every epoch shuffles the documents anew."""

    def __init__(self, directory: Path, shard_documents: Sequence[int]) -> None:
        """Describe shards in `directory`, which hold these numbers of documents."""
        self.directory = directory
        self._first_documents = np.cumsum([0, *shard_documents])  # [shards + 1]
        self._mapped: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def num_documents(self) -> int:
        return int(self._first_documents[-1])

    @property
    @abstractmethod
    def document_lengths(self) -> NDArray[np.int64]:
        """The number of tokens in each document, i64[documents]."""

    @property
    @abstractmethod
    def document_ids(self) -> NDArray[np.int64]:
        """Index of each document's line in stage 1's documents.jsonl, from 0, i64[documents]."""

    @abstractmethod
    def loss_masks(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """Yields loss masks [N] and document offsets [documents + 1] of consecutive documents, without copies."""

    @abstractmethod
    def record(self, shard: int) -> ShardRecord:
        """Returns the description of a shard."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Returns what identifies the documents and the order of training on them, by names for error messages."""

    def document(self, index: int) -> StoredDocument:
        """Returns the document at `index`, without a copy, after checking its bytes."""
        path, shard, local = self._locate(index)
        document = _document(shard, local)
        expected, checksum = shard[CHECKSUMS][local].numpy().tobytes(), document_checksum(vars(document))
        what = f"checksum of the document with id {document.document_id}"
        _refuse_damaged(path, what, expected.hex(), checksum.hex(), self.more_advice)
        return document

    def shards_of(self, documents: Sequence[int]) -> list[int]:
        return np.unique(np.searchsorted(self._first_documents, documents, side="right") - 1).tolist()

    def close(self) -> None:
        """Unmap all shards. A finished store may be read again, and is then mapped anew."""
        self._mapped.clear()

    def set_steps(self, steps: Sequence[Sequence[Sequence[int]]]) -> None:  # noqa: B027 (a finished store need not know)
        """Set the documents that training reads: those of each micro-batch of each step of the first epoch."""

    def wait_for(self, step: int, ranks: Ranks, stop: StopSignal) -> signal.Signals | None:
        """Wait until the states of step `step` (from 0) exist. Returns early with the signal if a rank received one."""
        return None

    def frees_disk_after(self, step: int) -> bool:
        """Returns whether a checkpoint after `step` steps lets `release` free disk space."""
        return False

    def release(self, step: int, is_last: bool, is_first_rank: bool) -> None:  # noqa: B027 (a finished store stays)
        """Free the disk space of states that no step after a checkpoint at `step` reads, if they may be deleted."""

    def _locate(self, index: int) -> tuple[Path, dict[str, torch.Tensor], int]:
        """Returns the path and tensors of a document's shard, and the document's index in that shard."""
        assert 0 <= index < self.num_documents, "document index out of range"
        (shard,) = self.shards_of([index])
        return self.directory / self.record(shard).file, self._shard(shard), index - int(self._first_documents[shard])

    def _shard(self, index: int) -> dict[str, torch.Tensor]:
        if index not in self._mapped:
            record = self.record(index)
            _check_length(self.directory, index, record)
            _check_tables(self.directory, index, record)
            # The mapping outlives the open file, so shards hold no file descriptors.
            with safe_open(self.directory / record.file, framework="pt") as file:
                self._mapped[index] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._mapped[index]


class HiddenStore(HiddenStates):
    """A finished store."""

    more_advice = "; run mtptrain verify to check the whole store"

    def __init__(self, directory: Path, manifest: StoreManifest) -> None:
        super().__init__(directory, [record.num_documents for record in manifest.shards])
        self.manifest = manifest

    @staticmethod
    def open(directory: Path, expected: StoreIdentity | None = None) -> "HiddenStore":
        """Open a finished store by its manifest; refuse another identity than expected, and shards cut short."""
        store = HiddenStore(directory, StoreManifest.read(directory))
        if expected is not None:
            refuse_other(directory / MANIFEST, expected, store.manifest.identity)
            for index, record in enumerate(store.manifest.shards):
                _check_length(directory, index, record)
        return store

    @cached_property
    def document_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([np.diff(shard["document_offsets"].numpy()) for shard in self._shards()])

    @cached_property
    def document_ids(self) -> NDArray[np.int64]:
        return np.concatenate([shard["document_ids"].numpy() for shard in self._shards()])

    def loss_masks(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        for shard in self._shards():
            yield shard["loss_mask"].numpy(), shard["document_offsets"].numpy()

    def record(self, shard: int) -> ShardRecord:
        return self.manifest.shards[shard]

    def facts(self) -> dict[str, object]:
        return {"the sha256 of the hidden states' manifest": file_sha256(self.directory / MANIFEST)}

    def _shards(self) -> list[dict[str, torch.Tensor]]:
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            return list(pool.map(self._shard, range(len(self.manifest.shards))))


def _document(shard: dict[str, torch.Tensor], index: int) -> StoredDocument:
    start, end = shard["document_offsets"][index : index + 2].tolist()
    tensors = {name: shard[name][start:end] if name in shard else None for name in CHECKED}
    return StoredDocument(document_id=int(shard["document_ids"][index]), **tensors)  # type: ignore[arg-type]


def find_damage(store: HiddenStore, shards: Iterable[int] | None = None, show_progress: bool = True) -> dict[int, str]:
    """Returns a message for each of these shards, all by default, whose sha256 is not that of the manifest."""
    indices = range(len(store.manifest.shards)) if shards is None else shards
    records = {index: store.manifest.shards[index] for index in indices}
    num_bytes = sum(record.num_bytes for record in records.values())
    damaged = {}
    with ProgressBar(
        total=num_bytes, unit="B", unit_scale=True, desc="verify hidden states", disable=not show_progress
    ) as bar:
        for index, record in records.items():
            path = store.directory / record.file
            try:
                _check_length(store.directory, index, record)
                _refuse_damaged(path, f"sha256 of shard {index}", record.sha256, file_sha256(path))
            except UserError as error:
                damaged[index] = str(error)
            bar.update(record.num_bytes)
    return damaged


def _refuse_damaged(path: Path, what: str, expected: str, found: str, more_advice: str = "") -> None:
    if found != expected:
        raise UserError(
            f"{path}: the {what} must be {expected}, but is {found}: bytes were changed or damaged after they were "
            f"written; {REMEDY}{more_advice}"
        )


def _check_tables(directory: Path, index: int, record: ShardRecord) -> None:
    """Compare the header, tables and loss mask of a shard with the manifest's checksum."""
    path = directory / record.file
    with path.open("rb") as file:
        header_and_tables = file.read(record.index_bytes)
        file.seek(record.num_bytes - record.num_tokens)
        checksum = index_checksum(header_and_tables, file.read(record.num_tokens))
    _refuse_damaged(path, f"checksum of header, tables and loss mask of shard {index}", record.index_checksum, checksum)


def _check_length(directory: Path, index: int, record: ShardRecord) -> None:
    path = directory / record.file
    if not has_length(path, record):
        found = f"has {path.stat().st_size}" if path.exists() else "does not exist"
        raise UserError(
            f"{path}: shard {index} must have {record.num_bytes} bytes, but {found}; run mtptrain hidden-states, which "
            "recomputes only this shard"
        )


def has_length(path: Path, record: ShardRecord) -> bool:
    """Returns whether a shard exists and has its full length. Training may delete a streamed shard at any time."""
    try:
        return path.stat().st_size == record.num_bytes
    except FileNotFoundError:
        return False
