"""The format of stage 2's output: filled by data_prep.hidden_states, read by training.

`run_dir/hidden_states/` holds `shard_00000.safetensors`, ... and `manifest.json`, which is written last and says what the states
belong to. A shard: `input_ids` i32[N], `loss_mask` u8[N], `document_offsets` i64[D+1], `document_ids` i64[D], `hidden_states`
bf16[N, H] (after the last decoder layer, before the final norm) and, for heads that capture layers, `aux_hidden_states`
bf16[N, L, H]. While the store is being filled, `plan.json` stands for the manifest and a `shard_*.json` beside each finished shard
holds its hash; neither outlives the manifest.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tqdm import tqdm

from mtptrain.target import TargetIdentity
from mtptrain.tensor_files import write_tensors

SCHEMA_VERSION = 1
MANIFEST, PLAN = "manifest.json", "plan.json"


@dataclass(frozen=True)
class StoreIdentity:
    """What must be equal for stored hidden states to be usable; independent of how and where they were computed."""

    target: TargetIdentity
    capture_layers: tuple[int, ...]
    """Layers of `aux_hidden_states`, in its order: id k is the residual stream after k decoder layers."""
    compute_dtype: str
    """Of the target's weights and arithmetic."""
    prompts_sha256: str
    """Of stage 1's train.safetensors."""
    hidden_states: str = "before_final_norm"
    dtype: str = "bfloat16"
    backend: str = "transformers"

    @staticmethod
    def of(target: TargetIdentity, capture_layers: tuple[int, ...], compute_dtype: str, prompts_file: Path) -> "StoreIdentity":
        """For the documents in `prompts_file`, whose bytes are hashed."""
        return StoreIdentity(target, tuple(capture_layers), compute_dtype, _file_sha256(prompts_file))

    def facts(self) -> dict[str, object]:
        """What is compared, by the name that a message gives it; a target may move, so its path and revision are not."""
        return {
            "the hash of the target's config": self.target.config_sha256,
            "the hash of the target's weights": self.target.weights_sha256,
            "the hash of the tokenizer": self.target.tokenizer_sha256,
            "the hash of the chat template": self.target.chat_template_sha256,
            "the captured layers": self.capture_layers,
            "the computing dtype (hidden_states.dtype)": self.compute_dtype,
            "the hash of the prompts (train.safetensors)": self.prompts_sha256,
            "the norm state": self.hidden_states,
            "the stored dtype": self.dtype,
            "the backend": self.backend,
        }


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
        content = _read_json(path)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: the schema version must be {SCHEMA_VERSION}, but is {content.get('schema_version')}; "
                f"delete {directory} and run data_prep.hidden_states again"
            )
        try:
            shards = tuple(ShardRecord(**record) for record in content.pop("shards"))
            return Manifest(identity=_identity_from_json(content.pop("identity")), shards=shards, **content)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: must hold every field of a manifest and no other, but does not ({error}); delete {directory} and run "
                "data_prep.hidden_states again"
            ) from error


def shard_ranges(lengths: NDArray[np.int64], shard_tokens: int) -> list[range]:
    """Documents of each shard: a shard ends with the document that reaches `shard_tokens`, whatever the number of ranks.

    Args:
        lengths: tokens of each document [D].
        shard_tokens: at least 1.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shards: list[range] = []
    start = 0
    while start < len(lengths):
        end = min(int(np.searchsorted(offsets, offsets[start] + shard_tokens)), len(lengths))
        shards.append(range(start, end))
        start = end
    return shards


def begin_store(directory: Path, identity: StoreIdentity, shard_tokens: int) -> Manifest | None:
    """Make the directory ready for shards, or for the rest of them after an interruption. One process calls it.

    Returns:
        The manifest where the store is finished and every shard lies there in full length: then nothing is left to do.

    Raises:
        ValueError: the directory holds states of another target, tokenizer, template, layers, dtype, prompts or shard size.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / MANIFEST).exists():
        manifest = Manifest.read(directory)
        _refuse_other(directory / MANIFEST, identity, manifest.identity, shard_tokens, manifest.shard_tokens)
        if all(_has_length(directory / record.file, record) for record in manifest.shards):
            _remove(directory, "*.tmp", PLAN, "shard_*.json")
            return manifest
        _reopen(directory, manifest)
    elif (directory / PLAN).exists():
        plan = _read_json(directory / PLAN)
        _refuse_other(directory / PLAN, identity, _identity_from_json(plan["identity"]), shard_tokens, plan["shard_tokens"])
    else:
        _write_plan(directory, identity, shard_tokens)
    _remove(directory, "*.tmp", *(path.name for path in directory.glob("shard_*.safetensors") if not _record_path(path).exists()))
    return None


def has_shard(directory: Path, index: int) -> bool:
    """Whether a shard of an unfinished store is complete: every byte is read and agrees with its record."""
    path = _shard_path(directory, index)
    if not (path.exists() and _record_path(path).exists()):
        return False
    recorded: str = _read_json(_record_path(path))["sha256"]
    return _file_sha256(path) == recorded


def write_shard(directory: Path, index: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write a shard and then its record, each under a temporary name, synced, renamed: a kill leaves it complete or absent.

    Args:
        directory: of a store that `begin_store` made ready.
        index: of the shard.
        tensors: as the module's docstring lists them.
    """
    path = _shard_path(directory, index)
    temporary = _temporary_path(path)
    write_tensors(temporary, tensors)
    record = ShardRecord(
        file=path.name,
        num_documents=len(tensors["document_ids"]),
        num_tokens=len(tensors["input_ids"]),
        num_supervised_tokens=int(tensors["loss_mask"].sum()),
        num_bytes=temporary.stat().st_size,
        sha256=_file_sha256(temporary),
    )
    _publish(temporary, path)
    _write_json(_record_path(path), asdict(record))


def finish_store(directory: Path, identity: StoreIdentity, shard_tokens: int, hidden_size: int, num_shards: int) -> Manifest:
    """Write the manifest over all shards and remove the records. One process calls it, after every shard is written."""
    records = [ShardRecord(**_read_json(_record_path(_shard_path(directory, index)))) for index in range(num_shards)]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        identity=identity,
        shard_tokens=shard_tokens,
        hidden_size=hidden_size,
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_supervised_tokens=sum(record.num_supervised_tokens for record in records),
        shards=tuple(records),
    )
    _write_json(directory / MANIFEST, asdict(manifest))
    _remove(directory, "*.tmp", PLAN, "shard_*.json")
    return manifest


@dataclass(frozen=True)
class StoredDocument:
    """One document as memory-mapped views; read-only by agreement."""

    document_id: int
    """Line in stage 1's documents.jsonl."""
    input_ids: torch.Tensor  # i32[n]
    loss_mask: torch.Tensor  # u8[n]
    hidden_states: torch.Tensor  # bf16[n, H], before the final norm
    aux_hidden_states: torch.Tensor | None  # bf16[n, L, H]


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
            aux_hidden_states=shard["aux_hidden_states"][start:end] if "aux_hidden_states" in shard else None,
        )

    def _shard(self, index: int) -> dict[str, torch.Tensor]:
        if index not in self._mapped:
            record = self.manifest.shards[index]
            _check_length(self.directory, index, record)
            # Closing the file keeps the mapping: no file descriptor stays open per shard.
            with safe_open(self.directory / record.file, framework="pt") as file:
                self._mapped[index] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._mapped[index]


def open_store(directory: Path, expected: StoreIdentity) -> HiddenStore:
    """Open a store for training, if it is that of this target, tokenizer, template, captured layers, dtype and prompts.

    Raises:
        FileNotFoundError: the store does not exist or is unfinished.
        ValueError: it belongs to something else; the message names each difference and both values.
    """
    store = HiddenStore.open(directory)
    _refuse_other(directory / MANIFEST, expected, store.manifest.identity)
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
            digest = _file_sha256(store.directory / record.file)
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
    if not _has_length(path, record):
        raise ValueError(f"{path}: shard {index} must have {record.num_bytes} bytes, but has {path.stat().st_size}; {remedy}")


def _has_length(path: Path, record: ShardRecord) -> bool:
    return path.exists() and path.stat().st_size == record.num_bytes


def _refuse_other(path: Path, expected: StoreIdentity, found: StoreIdentity, *shard_tokens: int) -> None:
    """Raise for what differs; `shard_tokens`, expected and found, counts only where shards are still to be written."""
    wanted, present = expected.facts(), found.facts()
    if shard_tokens:
        wanted["hidden_states.shard_tokens"], present["hidden_states.shard_tokens"] = shard_tokens
    differences = [f"{name} must be {value}, but is {present[name]}" for name, value in wanted.items() if present[name] != value]
    if differences:
        raise ValueError(
            f"{path}: {'; '.join(differences)} (target expected: {expected.target.path}, found: {found.target.path}); undo the "
            f"change, choose another run_dir, or delete {path.parent} and run data_prep.hidden_states again"
        )


def _identity_from_json(content: dict[str, Any]) -> StoreIdentity:
    target, layers = TargetIdentity(**content["target"]), tuple(content["capture_layers"])
    return StoreIdentity(**{**content, "target": target, "capture_layers": layers})


def _reopen(directory: Path, manifest: Manifest) -> None:
    """Make a finished store that lost a shard an unfinished one; the manifest goes last, so that a kill in between is harmless."""
    for record in manifest.shards:
        _write_json(_record_path(directory / record.file), asdict(record))
    _write_plan(directory, manifest.identity, manifest.shard_tokens)
    _remove(directory, MANIFEST)


def _write_plan(directory: Path, identity: StoreIdentity, shard_tokens: int) -> None:
    _write_json(directory / PLAN, {"identity": asdict(identity), "shard_tokens": shard_tokens})


def _shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard_{index:05d}.safetensors"


def _record_path(shard_path: Path) -> Path:
    return shard_path.with_suffix(".json")


def _temporary_path(path: Path) -> Path:
    """Of this process alone: workers may outlive a killed torchrun and write the same shard as the run that resumes."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path}: must be JSON, but is not ({error}); delete {path.parent} and run data_prep.hidden_states again"
        ) from error
    assert isinstance(content, dict)
    return content


def _write_json(path: Path, content: object) -> None:
    temporary = _temporary_path(path)
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    _publish(temporary, path)


def _publish(temporary: Path, path: Path) -> None:
    """Rename after the bytes are on the disk, and make the new name last too."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(directory: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in directory.glob(pattern):
            path.unlink()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
