"""Filling a hidden-state store: shards whose bounds depend on the prompts alone, each complete or absent whatever kills the run.

Written by data_prep.hidden_states; mtptrain/hidden_store.py has the format and reads it.
"""

import json
import math
import os
import shutil
import socket
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.atomic_files import publish, write_text
from mtptrain.config import StoreDtype
from mtptrain.fp8 import encode
from mtptrain.hidden_store import MANIFEST, PLAN, SCHEMA_VERSION, Manifest, ShardRecord, has_length, read_json, scales_of
from mtptrain.identity import StoreIdentity, file_sha256, identity_from_json, refuse_other

STATE_BYTES = {StoreDtype.bfloat16: 2, StoreDtype.fp8: 1}
"""Of one value of a state on disk."""
SCALE_BYTES = {StoreDtype.bfloat16: 0, StoreDtype.fp8: 4}
"""Of one token's scale, per layer."""
TEMPORARY = ("shard_*.tmp", f"{PLAN}.*.tmp", f"{MANIFEST}.*.tmp", "mtptrain_*.tmp")
"""Of shards, of the two files beside them, and folders of backends."""
DOCUMENT_BYTES = 16
"""Of one document: its id, and where it begins."""
ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


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


def bytes_per_token(hidden_size: int, num_captured: int, dtype: StoreDtype) -> int:
    """On disk: token id, mask, and the states of every layer with their scales; documents cost `DOCUMENT_BYTES` each besides."""
    return (hidden_size * STATE_BYTES[dtype] + SCALE_BYTES[dtype]) * (1 + num_captured) + 4 + 1


def begin_store(directory: Path, identity: StoreIdentity, shard_tokens: int, shards: Collection[int]) -> Manifest | None:
    """Make the directory ready for shards, or for the rest of them after an interruption.

    One process of a part calls it; other parts may be at work on other shards.

    Args:
        directory: of the store.
        identity: what the states belong to.
        shard_tokens: as in `shard_ranges`.
        shards: indices of the part's own shards, whose leftovers are removed.

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
            _remove(directory, "*.tmp", PLAN, "shard_*.json")
            return manifest
        _reopen(directory, manifest)
    elif (directory / PLAN).exists():
        plan = read_json(directory / PLAN)
        refuse_other(directory / PLAN, identity, identity_from_json(plan["identity"]), shard_tokens, plan["shard_tokens"])
    else:
        _write_plan(directory, identity, shard_tokens)
    for path in (_shard_path(directory, index) for index in shards):
        _remove(
            directory,
            f"{path.stem}.*.tmp",
            *(() if _record_path(path).exists() or (directory / MANIFEST).exists() else (path.name,)),
        )
    return None


def has_shard(directory: Path, index: int) -> bool:
    """Whether a shard of an unfinished store is complete: every byte is read and agrees with its record."""
    path, record = _shard_path(directory, index), _read_record(directory, index)
    if record is None and (directory / MANIFEST).exists():  # another part has finished the store since
        record = Manifest.read(directory).shards[index]
    if record is not None and path.exists() and file_sha256(path) == record.sha256:
        return True
    _record_path(path).unlink(missing_ok=True)
    return False


class ShardFile:
    """A shard that is being filled: a file of full size under a temporary name, whose documents come in any order.

    A kill leaves it complete or absent: it gets its name when every byte is on the disk, and then its record.
    """

    def __init__(
        self, directory: Path, index: int, tokens: dict[str, torch.Tensor], hidden_size: int, num_captured: int, dtype: StoreDtype
    ) -> None:
        """Take the space of a shard.

        Args:
            directory: of a store that `begin_store` made ready.
            index: of the shard.
            tokens: `input_ids`, `loss_mask`, `document_offsets` and `document_ids`, as mtptrain/hidden_store.py lists them.
            hidden_size: H.
            num_captured: L of `aux_hidden_states`.
            dtype: of the stored states.

        Raises:
            OSError: the disk has no room for it.
        """
        self._path = _shard_path(directory, index)
        self._temporary = _temporary_path(self._path)
        self._tokens, self._num_captured, self._dtype = tokens, num_captured, dtype
        self._row_bytes = hidden_size * STATE_BYTES[dtype]
        header, self._begins, self._num_bytes = _layout(tokens, hidden_size, num_captured, dtype)
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._is_open = True
        try:
            os.posix_fallocate(self._file, 0, self._num_bytes)
            _write_at(self._file, 0, header)
            for name, tensor in tokens.items():
                _write_at(self._file, self._begins[name], _bytes_of(tensor))
        except BaseException:
            self.discard()
            raise

    def write(self, document: int, streams: torch.Tensor) -> None:
        """Write the states of document `document` of the shard: [n, L + 1, H], captured layers first, in any float dtype.

        Raises:
            ValueError: a state is not finite.
            OSError: the disk is full.
        """
        first, end = self._tokens["document_offsets"][document : document + 2].tolist()
        assert streams.shape[:2] == (end - first, self._num_captured + 1), "streams of another document"
        if not torch.isfinite(streams).all():
            raise ValueError(
                f"{self._path}: hidden states must be finite, but those of document {int(self._tokens['document_ids'][document])} of "
                "documents.jsonl are not; set hidden_states.dtype=float32, or take the document out of the data"
            )
        self._write_rows("aux_hidden_states", first * self._num_captured, streams[:, :-1])
        self._write_rows("hidden_states", first, streams[:, -1:])

    def _write_rows(self, name: str, first_row: int, states: torch.Tensor) -> None:
        """Rows of [n, L, H] behind each other, from `first_row` of the tensor."""
        if self._dtype is StoreDtype.fp8:
            states, scales = encode(states)
            if scales.numel():
                _write_at(self._file, self._begins[scales_of(name)] + first_row * 4, _bytes_of(scales))
        else:
            states = states.to(torch.bfloat16)
        if states.numel():
            _write_at(self._file, self._begins[name] + first_row * self._row_bytes, _bytes_of(states))

    def finish(self) -> None:
        """Hash, publish, and record."""
        self._close()
        record = ShardRecord(
            file=self._path.name,
            num_documents=len(self._tokens["document_ids"]),
            num_tokens=len(self._tokens["input_ids"]),
            num_supervised_tokens=int(self._tokens["loss_mask"].sum()),
            num_bytes=self._num_bytes,
            sha256=file_sha256(self._temporary),
        )
        publish(self._temporary, self._path)
        _write_json(_record_path(self._path), asdict(record))

    def discard(self) -> None:
        """Give the space back."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._file)


def _layout(
    tokens: dict[str, torch.Tensor], hidden_size: int, num_captured: int, dtype: StoreDtype
) -> tuple[bytes, dict[str, int], int]:
    """Of a shard: its safetensors header, where the bytes of each tensor begin, and the size of the file."""
    num_tokens, state_type = len(tokens["input_ids"]), {StoreDtype.bfloat16: "BF16", StoreDtype.fp8: "F8_E4M3"}[dtype]
    states = {"hidden_states": [num_tokens, hidden_size]}
    if num_captured:
        states["aux_hidden_states"] = [num_tokens, num_captured, hidden_size]
    scales = {scales_of(name): ("F32", shape[:-1]) for name, shape in states.items() if dtype is StoreDtype.fp8}
    tensors = {  # wide ones first, so that all are aligned
        "document_ids": ("I64", [len(tokens["document_ids"])]),
        "document_offsets": ("I64", [len(tokens["document_offsets"])]),
        **scales,
        "input_ids": ("I32", [num_tokens]),
        **{name: (state_type, shape) for name, shape in sorted(states.items())},
        "loss_mask": ("U8", [num_tokens]),
    }
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    relative: dict[str, int] = {}
    end = 0
    for name, (kind, shape) in tensors.items():
        relative[name], end = end, end + math.prod(shape) * ITEM_BYTES[kind]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [relative[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in relative.items()}, len(header) + end


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _write_at(file: int, position: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:  # a call writes 2 GiB at most
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def finish_store(directory: Path, identity: StoreIdentity, shard_tokens: int, hidden_size: int, num_shards: int) -> Manifest | None:
    """Write the manifest over all shards and remove the records; None where shards of other parts are missing still.

    One process of a part calls it, after the part's shards are written. Parts that end together write the same bytes.
    """
    records = [record for index in range(num_shards) if (record := _read_record(directory, index)) is not None]
    if len(records) < num_shards:
        if not (directory / MANIFEST).exists():
            return None
        _remove(directory, PLAN, "shard_*.json")  # of a part that began while another finished
        return Manifest.read(directory)
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
    try:
        _write_json(directory / MANIFEST, asdict(manifest))
    except FileNotFoundError:  # another part has just written it, and removed what lay around
        return Manifest.read(directory)
    _remove(directory, *TEMPORARY, PLAN, "shard_*.json")
    return manifest


def is_recorded(directory: Path, index: int) -> bool:
    """Whether a shard was finished, by this part or by another; its bytes are not looked at."""
    return _record_path(_shard_path(directory, index)).exists()


def _read_record(directory: Path, index: int) -> ShardRecord | None:
    try:
        return ShardRecord(**read_json(_record_path(_shard_path(directory, index))))
    except FileNotFoundError:
        return None


def _reopen(directory: Path, manifest: Manifest) -> None:
    """Make a finished store that lost a shard an unfinished one; the manifest goes last, so that a kill in between is harmless."""
    for record in manifest.shards:
        if has_length(directory / record.file, record):
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
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def _write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n", _temporary_path(path))


def _remove(directory: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
