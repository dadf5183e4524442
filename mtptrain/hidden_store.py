"""The format of stage 2's output: filled through mtptrain/hidden_store_writer.py, read by training.

`run_dir/hidden_states/` holds `shard_00000.safetensors`, ... and `manifest.json`, which is written last and says what the states
belong to. A shard: `input_ids` i32[N], `loss_mask` u8[N], `document_offsets` i64[D+1], `document_ids` i64[D], `hidden_states`
bf16[N, H] (after the last decoder layer, before the final norm) and, for heads that capture layers, `aux_hidden_states`
bf16[N, L, H]. With dtype fp8 these are e4m3, and `hidden_states_scales` f32[N] and `aux_hidden_states_scales` f32[N, L] lie beside
them (mtptrain/fp8.py). While the store is being filled, `plan.json` stands for the manifest and a `shard_*.json` beside each
finished shard holds its hash; neither outlives the manifest.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tqdm import tqdm

from mtptrain.config import PipelineConfig
from mtptrain.identity import StoreIdentity, TargetIdentity, TokenizerIdentity, file_sha256, identity_from_json, refuse_other
from mtptrain.prompt_files import PromptsManifest
from mtptrain.target import load_tokenizer

SCHEMA_VERSION = 1
MANIFEST, PLAN = "manifest.json", "plan.json"


def scales_of(name: str) -> str:
    """The tensor of scales that goes with one of e4m3 values."""
    return f"{name}_scales"


_OPTIONAL = ("aux_hidden_states", scales_of("hidden_states"), scales_of("aux_hidden_states"))


@dataclass(frozen=True)
class ShardRecord:
    """One shard as the manifest lists it."""

    file: str
    num_documents: int
    num_tokens: int
    num_supervised_tokens: int
    """Tokens whose loss mask is set."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a finished store holds. No times, hosts or ranks: equal states give equal bytes."""

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
    def read(directory: Path) -> "Manifest":
        """Read `directory`/manifest.json.

        Raises:
            FileNotFoundError: the store does not exist or is unfinished.
            ValueError: the file is damaged or of another schema version.
        """
        path = directory / MANIFEST
        if not path.exists():
            state = "the extraction is unfinished" if (directory / PLAN).exists() else "it does not"
            raise FileNotFoundError(
                f"{path}: must exist, but {state}; run data_prep.hidden_states with the same recipe and run_dir"
            )
        content = read_json(path)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: the schema version must be {SCHEMA_VERSION}, but is {content.get('schema_version')}; "
                f"delete {directory} and run data_prep.hidden_states again"
            )
        try:
            shards = tuple(ShardRecord(**record) for record in content.pop("shards"))
            return Manifest(identity=identity_from_json(content.pop("identity")), shards=shards, **content)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: must hold every field of a manifest and no other, but does not ({error}); delete {directory} and run "
                "data_prep.hidden_states again"
            ) from error


@dataclass(frozen=True)
class StoredDocument:
    """One document as memory-mapped views; read-only by agreement."""

    document_id: int
    """Line in stage 1's documents.jsonl."""
    input_ids: torch.Tensor  # i32[n]
    loss_mask: torch.Tensor  # u8[n]
    hidden_states: torch.Tensor  # bf16 or e4m3 [n, H], before the final norm
    aux_hidden_states: torch.Tensor | None  # bf16 or e4m3 [n, L, H]
    hidden_states_scales: torch.Tensor | None = None  # f32[n], of e4m3
    aux_hidden_states_scales: torch.Tensor | None = None  # f32[n, L]


class HiddenStore:
    """A finished store, read lazily: shards are mapped when a document of theirs is asked for, and stay mapped."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._first_documents = np.cumsum([0, *(record.num_documents for record in manifest.shards)])  # [shards + 1]
        self._mapped: dict[int, dict[str, torch.Tensor]] = {}

    @staticmethod
    def open(directory: Path) -> "HiddenStore":
        """Open by the manifest alone.

        Raises:
            FileNotFoundError: the store does not exist or is unfinished.
            ValueError: the manifest is damaged or of another schema version.
        """
        return HiddenStore(directory, Manifest.read(directory))

    @property
    def num_documents(self) -> int:
        return self.manifest.num_documents

    @cached_property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document [D]."""
        return np.concatenate([np.diff(self._shard(i)["document_offsets"].numpy()) for i in range(len(self.manifest.shards))])

    @cached_property
    def document_ids(self) -> NDArray[np.int64]:
        """Line of each document in stage 1's documents.jsonl [D]."""
        return np.concatenate([self._shard(i)["document_ids"].numpy() for i in range(len(self.manifest.shards))])

    @cached_property
    def loss_mask(self) -> NDArray[np.uint8]:
        """Of all tokens [N], documents in order: 1 where a token counts in the loss."""
        return np.concatenate([self._shard(i)["loss_mask"].numpy() for i in range(len(self.manifest.shards))])

    def document(self, index: int) -> StoredDocument:
        """Document `index` of `num_documents`, without a copy.

        Raises:
            FileNotFoundError, ValueError: its shard is missing or truncated.
        """
        assert 0 <= index < self.num_documents, "document index out of range"
        shard_index = int(np.searchsorted(self._first_documents, index, side="right")) - 1
        shard = self._shard(shard_index)
        local = index - int(self._first_documents[shard_index])
        start, end = shard["document_offsets"][local : local + 2].tolist()
        return StoredDocument(
            document_id=int(shard["document_ids"][local]),
            input_ids=shard["input_ids"][start:end],
            loss_mask=shard["loss_mask"][start:end],
            hidden_states=shard["hidden_states"][start:end],
            **{name: shard[name][start:end] if name in shard else None for name in _OPTIONAL},
        )

    def _shard(self, index: int) -> dict[str, torch.Tensor]:
        if index not in self._mapped:
            record = self.manifest.shards[index]
            _check_length(self.directory, index, record)
            # Closing the file keeps the mapping: no file descriptor stays open per shard.
            with safe_open(self.directory / record.file, framework="pt") as file:
                self._mapped[index] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._mapped[index]


def expected_identity(
    config: PipelineConfig, target_dir: Path, capture_layers: tuple[int, ...], prompts_file: Path
) -> StoreIdentity:
    """What the hidden states of a run must belong to: its target, and the prompts of `prompts_file`.

    Raises:
        ValueError: the prompts were made with another tokenizer or chat template than the target's.
    """
    tokenizer = load_tokenizer(target_dir)
    wanted, found = TokenizerIdentity.of(tokenizer), PromptsManifest.read(prompts_file.parent).tokenizer
    for name, value in vars(wanted).items():
        if getattr(found, name) != value:
            raise ValueError(
                f"{prompts_file.parent / 'manifest.json'}: {name} must be {value}, that of target {config.target.path}, but is "
                f"{getattr(found, name)}; run data_prep.prompts again with this target"
            )
    target = TargetIdentity.of(config.target.path, config.target.revision, target_dir, tokenizer)
    settings = config.hidden_states
    return StoreIdentity.of(target, capture_layers, settings.dtype, prompts_file, settings.store_dtype, settings.backend)


def open_store(directory: Path, expected: StoreIdentity) -> HiddenStore:
    """Open a store for training, if it is that of this target, tokenizer, template, captured layers, dtype and prompts.

    Raises:
        FileNotFoundError: the store does not exist or is unfinished.
        ValueError: it belongs to something else; the message names each difference and both values.
    """
    store = HiddenStore.open(directory)
    refuse_other(directory / MANIFEST, expected, store.manifest.identity)
    return store


def verify(store: HiddenStore, shards: Iterable[int] | None = None, show_progress: bool = True) -> None:
    """Read every byte of the shards and compare with the manifest's hashes.

    Args:
        store: to verify.
        shards: indices, all unless given; ranks may share the work: `range(rank, len(store.manifest.shards), world_size)`.
        show_progress: with a progress bar.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a shard is truncated or a byte of it differs.
    """
    chosen = list(range(len(store.manifest.shards)) if shards is None else shards)
    records = {index: store.manifest.shards[index] for index in chosen}
    num_bytes = sum(record.num_bytes for record in records.values())
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="verify hidden states", disable=not show_progress) as bar:
        for index, record in records.items():
            _check_length(store.directory, index, record)
            digest = file_sha256(store.directory / record.file)
            if digest != record.sha256:
                raise ValueError(
                    f"{store.directory / record.file}: the sha256 of shard {index} must be {record.sha256}, but is {digest}: bytes "
                    "were changed or damaged after it was written; delete this file and run data_prep.hidden_states, which "
                    "computes it alone again"
                )
            bar.update(record.num_bytes)


def _check_length(directory: Path, index: int, record: ShardRecord) -> None:
    path = directory / record.file
    remedy = "run data_prep.hidden_states, which computes it alone again"
    if not path.exists():
        raise FileNotFoundError(f"{path}: shard {index} must exist, but does not; {remedy}")
    if not has_length(path, record):
        raise ValueError(f"{path}: shard {index} must have {record.num_bytes} bytes, but has {path.stat().st_size}; {remedy}")


def has_length(path: Path, record: ShardRecord) -> bool:
    return path.exists() and path.stat().st_size == record.num_bytes


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path}: must be JSON, but is not ({error}); delete {path.parent} and run data_prep.hidden_states again"
        ) from error
    assert isinstance(content, dict)
    return content
