"""Writes a store of hidden states in the format of store.py; a kill leaves every shard complete or absent."""

import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.config import StoreDtype
from mtptrain.data.identity import StoreIdentity, refuse_other
from mtptrain.hidden_states.fp8 import encode
from mtptrain.hidden_states.shard_format import (
    AUX_HIDDEN_STATES,
    CHECKSUM_BYTES,
    CHECKSUMS,
    HIDDEN_STATES,
    ShardLayout,
    bytes_of,
    document_checksum,
    index_checksum,
    is_fp8,
    scales_of,
)
from mtptrain.hidden_states.store import (
    MANIFEST,
    PLAN,
    SCHEMA_VERSION,
    ShardRecord,
    StoreManifest,
    StorePlan,
    has_length,
)
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256, publish, read_manifest, unique_temporary, write_sealed

RECOMPUTE = "delete it and run mtptrain hidden-states, which recomputes only this shard"
_SHARD = re.compile(r"shard_(\d{5}|[1-9]\d{5,})\.(safetensors|json)(\.[\w.-]+\.\d+\.tmp)?")
"""Names of a shard, of its record, and of the temporary files of both."""
_OTHER_TEMPORARY = re.compile(
    rf"({re.escape(PLAN)}|{re.escape(MANIFEST)})\.[\w.-]+\.\d+\.tmp|mtptrain_[0-9a-f]{{12}}_\d+_\d+\.tmp"
)
"""Names of the temporary files of the plan and the manifest, and of the backends' temporary folders."""


def shard_ranges(lengths: NDArray[np.int64], shard_tokens: int) -> list[range]:
    """Returns the indices of the documents in each shard, from the number of tokens in each document, i64[documents].

    A shard ends with the document that reaches `shard_tokens`, so the number of ranks does not matter.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shards: list[range] = []
    start = 0
    while start < len(lengths):
        end = min(int(np.searchsorted(offsets, offsets[start] + shard_tokens)), len(lengths))
        shards.append(range(start, end))
        start = end
    return shards


def begin_store(
    directory: Path, identity: StoreIdentity, shard_tokens: int, shards: Collection[int]
) -> StoreManifest | None:
    """Prepare a directory for new shards, or for the missing ones after an interruption.

    One process of each `hidden_states.part` calls this. Other parts may be writing other shards at the same time. The
    incomplete files of this part's `shards` are removed. Returns the manifest if the store is finished and every shard
    has its full length; otherwise None.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / MANIFEST).exists():
        manifest = StoreManifest.read(directory)
        refuse_other(directory / MANIFEST, identity, manifest.identity, shard_tokens, manifest.shard_tokens)
        if all(has_length(directory / record.file, record) for record in manifest.shards):
            _remove_unfinished(directory, len(manifest.shards))
            return manifest
        _reopen(directory, manifest)
    elif (directory / PLAN).exists():
        plan = StorePlan.read(directory)
        refuse_other(directory / PLAN, identity, plan.identity, shard_tokens, plan.shard_tokens)
    else:
        _write_plan(directory, identity, shard_tokens)
    own = set(shards)
    finished = finished_shards(directory, own)
    for path in list(directory.iterdir()):
        name = _SHARD.fullmatch(path.name)
        if name is not None and int(name[1]) in own and (name[3] or int(name[1]) not in finished):
            path.unlink(missing_ok=True)
    return None


def finished_shards(directory: Path, indices: Iterable[int]) -> dict[int, ShardRecord]:
    """Returns the records of those shards that are finished, by this part or another, and have their full length.

    This does not check the shards' bytes, which were on disk before their records were written. Training checks every
    document that it reads, and `verify` checks every shard.
    """
    shards = set(indices)
    finished = {index: record for index in shards if (record := read_record(directory, index)) is not None}
    if len(finished) < len(shards) and (directory / MANIFEST).exists():
        # Another part has finished the store in the meantime. A store of other settings, which `begin_store` refuses
        # later, may have fewer shards.
        for index, record in enumerate(StoreManifest.read(directory).shards):
            if index in shards - finished.keys() and has_length(directory / record.file, record):
                finished[index] = record
    return finished


class ShardFile:
    """A shard that is being written: a temporary file of full size. Its documents may be written in any order."""

    def __init__(
        self,
        directory: Path,
        index: int,
        tokens: dict[str, torch.Tensor],
        hidden_size: int,
        num_captured: int,
        dtype: StoreDtype,
    ) -> None:
        """Allocate the disk space of a shard that holds `tokens` of the prompts, and states with L = `num_captured`."""
        self._path = shard_path(directory, index)
        self._temporary = unique_temporary(self._path)
        self._tokens, self._num_captured, self._dtype = tokens, num_captured, dtype
        self._hidden_size = hidden_size
        self._layout = ShardLayout.of(tokens, hidden_size, num_captured, dtype)
        self._checksums = torch.zeros(len(tokens["document_ids"]), CHECKSUM_BYTES, dtype=torch.uint8)
        self._file = self._temporary.open("wb+", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._layout.num_bytes)
            _write_at(self._file.fileno(), 0, self._layout.header)
            for name, tensor in tokens.items():
                self._write_tensor(name, 0, tensor)
        except BaseException:
            self.discard()
            raise

    def write(self, document: int, streams: torch.Tensor) -> None:
        """Write the states [n, L + 1, H], the last layer's last, of the document at index `document` in the shard."""
        first, end = self._tokens["document_offsets"][document : document + 2].tolist()
        expected = (end - first, self._num_captured + 1, self._hidden_size)
        assert streams.shape == expected, "streams of another document or target"
        if not is_finite(streams):
            raise UserError(
                f"{self._path}: hidden states must be finite, but those of document "
                f"{int(self._tokens['document_ids'][document])} of documents.jsonl are not; delete "
                f"{self._path.parent}, then set hidden_states.dtype=float32, or remove the document from the data and "
                "run mtptrain prompts again"
            )
        states = self._encoded(HIDDEN_STATES, streams[:, -1])
        if self._num_captured:
            states |= self._encoded(AUX_HIDDEN_STATES, streams[:, :-1])
        for name, tensor in states.items():
            self._write_tensor(name, first, tensor)
        tokens = {name: self._tokens[name][first:end] for name in ("input_ids", "loss_mask")}
        checksum = document_checksum({**tokens, **states})
        self._checksums[document] = torch.frombuffer(bytearray(checksum), dtype=torch.uint8)

    def _encoded(self, name: str, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the states in their stored dtype, and their scales, on the CPU. Encodes on the device of `states`."""
        if not is_fp8(self._dtype, name):
            return {name: states.to(torch.bfloat16).cpu().contiguous()}
        values, scales = encode(states)
        return {name: values.cpu(), scales_of(name): scales.cpu()}

    def _write_tensor(self, name: str, first_row: int, tensor: torch.Tensor) -> None:
        """Write rows of the shard's tensor `name`, starting at `first_row`."""
        row_bytes = tensor[:1].numel() * tensor.element_size()
        if row_bytes:
            _write_at(self._file.fileno(), self._layout.begins[name] + first_row * row_bytes, bytes_of(tensor))

    def finish(self) -> None:
        """Hash the shard, rename it and write its record."""
        self._write_tensor(CHECKSUMS, 0, self._checksums)
        header_and_tables = os.pread(self._file.fileno(), self._layout.index_bytes, 0)
        self._file.close()
        record = ShardRecord(
            file=self._path.name,
            num_documents=len(self._tokens["document_ids"]),
            num_tokens=len(self._tokens["input_ids"]),
            num_supervised_tokens=int(self._tokens["loss_mask"].sum()),
            num_bytes=self._layout.num_bytes,
            sha256=file_sha256(self._temporary),
            index_bytes=self._layout.index_bytes,
            index_checksum=index_checksum(header_and_tables, bytes_of(self._tokens["loss_mask"])),
        )
        publish(self._temporary, self._path)
        _write_sealed(record_path(self._path), asdict(record))

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def is_finite(states: torch.Tensor) -> bool:
    """Returns whether every value is finite: on a CPU more than ten times as fast as `isfinite` on the whole tensor.

    The minimum and maximum are NaN if any value is.
    """
    return bool(torch.stack(torch.aminmax(states)).isfinite().all())


def _write_at(file: int, position: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:  # one call writes at most 2 GiB
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def finish_store(
    directory: Path, identity: StoreIdentity, shard_tokens: int, hidden_size: int, num_shards: int
) -> StoreManifest | None:
    """Write the manifest and remove the records, or return None if shards of other parts are still missing.

    Each part calls this once after its shards. Parts that finish at the same time write the same bytes.
    """
    finished = finished_shards(directory, range(num_shards))
    if len(finished) < num_shards:
        return None
    records = tuple(finished[index] for index in range(num_shards))
    manifest = StoreManifest(
        schema_version=SCHEMA_VERSION,
        identity=identity,
        shard_tokens=shard_tokens,
        hidden_size=hidden_size,
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_supervised_tokens=sum(record.num_supervised_tokens for record in records),
        shards=records,
    )
    with suppress(FileNotFoundError):  # another part has just written it and removed the temporary files
        _write_sealed(directory / MANIFEST, asdict(manifest))
    _remove_unfinished(directory, num_shards)
    return manifest


def read_record(directory: Path, index: int) -> ShardRecord | None:
    """Returns the record of a shard; None if there is no record, or if the shard does not have its full length."""
    shard = shard_path(directory, index)
    path = record_path(shard)
    try:
        record = read_manifest(ShardRecord, path, StoreIdentity.program, RECOMPUTE)
    except FileNotFoundError:
        return None
    if record.file != shard.name:
        raise UserError(f"{path}: must be the record of {shard.name}, but is that of {record.file}; {RECOMPUTE}")
    return record if has_length(shard, record) else None


def _reopen(directory: Path, manifest: StoreManifest) -> None:
    """Turn a finished store that lost a shard into an unfinished one.

    The manifest is deleted last, so that a kill is harmless. Several parts may do this at the same time.
    """
    for record in manifest.shards:
        if has_length(directory / record.file, record):
            _write_sealed(record_path(directory / record.file), asdict(record))
    _write_plan(directory, manifest.identity, manifest.shard_tokens)
    (directory / MANIFEST).unlink(missing_ok=True)


def _write_plan(directory: Path, identity: StoreIdentity, shard_tokens: int) -> None:
    _write_sealed(directory / PLAN, asdict(StorePlan(identity, shard_tokens)))


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard_{index:05d}.safetensors"


def record_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _write_sealed(path: Path, content: dict[str, Any]) -> None:
    write_sealed(path, content, temporary=unique_temporary(path))


def _remove_unfinished(directory: Path, num_shards: int) -> None:
    """Remove the plan, the records and the temporary files of a finished store."""
    for path in list(directory.iterdir()):
        if (name := _SHARD.fullmatch(path.name)) is not None:
            is_needless = int(name[1]) < num_shards and (name[3] is not None or name[2] == "json")
        else:
            is_needless = path.name == PLAN or _OTHER_TEMPORARY.fullmatch(path.name) is not None
        if is_needless:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
