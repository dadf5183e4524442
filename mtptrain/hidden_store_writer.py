"""Filling a hidden-state store: shards whose bounds depend on the prompts alone, each complete or absent whatever kills the run.

Written by data_prep.hidden_states; mtptrain/hidden_store.py has the format and reads it.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.hidden_store import MANIFEST, PLAN, SCHEMA_VERSION, Manifest, ShardRecord, has_length, read_json
from mtptrain.identity import StoreIdentity, file_sha256, identity_from_json, refuse_other
from mtptrain.tensor_files import write_tensors

TEMPORARY = ("*.tmp", ".tmp*")  # ours, and what safetensors writes before it renames


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
        refuse_other(directory / MANIFEST, identity, manifest.identity, shard_tokens, manifest.shard_tokens)
        if all(has_length(directory / record.file, record) for record in manifest.shards):
            _remove(directory, *TEMPORARY, PLAN, "shard_*.json")
            return manifest
        _reopen(directory, manifest)
    elif (directory / PLAN).exists():
        plan = read_json(directory / PLAN)
        refuse_other(directory / PLAN, identity, identity_from_json(plan["identity"]), shard_tokens, plan["shard_tokens"])
    else:
        _write_plan(directory, identity, shard_tokens)
    _remove(
        directory, *TEMPORARY, *(path.name for path in directory.glob("shard_*.safetensors") if not _record_path(path).exists())
    )
    return None


def has_shard(directory: Path, index: int) -> bool:
    """Whether a shard of an unfinished store is complete: every byte is read and agrees with its record."""
    path = _shard_path(directory, index)
    if not (path.exists() and _record_path(path).exists()):
        return False
    recorded: str = read_json(_record_path(path))["sha256"]
    return file_sha256(path) == recorded


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
        sha256=file_sha256(temporary),
    )
    _publish(temporary, path)
    _write_json(_record_path(path), asdict(record))


def finish_store(directory: Path, identity: StoreIdentity, shard_tokens: int, hidden_size: int, num_shards: int) -> Manifest:
    """Write the manifest over all shards and remove the records. One process calls it, after every shard is written."""
    records = [ShardRecord(**read_json(_record_path(_shard_path(directory, index)))) for index in range(num_shards)]
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
    _remove(directory, *TEMPORARY, PLAN, "shard_*.json")
    return manifest


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
