"""Tests that damaged and missing shards are named before their states are used."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.hidden_states.writer import read_record
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.mtptrain.hidden_states.small_store import IDENTITY, LENGTHS, make_store
from tests.sealed import flip_bit, seal_again


@pytest.mark.parametrize("position", [3, 200, -1])  # in the length of the header, the header, the loss mask
def test_a_flipped_bit_is_found_and_its_shard_named(tmp_path: Path, position: int) -> None:
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    assert not find_damage(store)
    path, sha256 = tmp_path / "shard_00002.safetensors", store.manifest.shards[2].sha256
    flip_bit(path, position)
    found = find_damage(store)
    assert list(found) == [2]
    assert re.search(rf"{path}: the sha256 of shard 2 must be {sha256}, but is .*delete the shard's file", found[2])
    assert not find_damage(store, shards=[0, 1, 3])


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_truncated_or_missing_shard_is_named_by_verify_and_by_reading(tmp_path: Path, is_missing: bool) -> None:
    make_store(tmp_path)
    store, path = HiddenStore.open(tmp_path), tmp_path / "shard_00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    if is_missing:
        path.unlink()
    problem = "must exist, but does not" if is_missing else r"must have \d+ bytes, but has \d+"
    flip_bit(tmp_path / "shard_00003.safetensors", -1)
    found, message = find_damage(store, show_progress=False), rf"{path}: shard 1 {problem}; run mtptrain hidden-states"
    assert sorted(found) == [1, 3] and re.search(message, found[1])
    for read in (lambda: store.document(4), lambda: HiddenStore.open(tmp_path, IDENTITY)):
        with pytest.raises(UserError, match=message):
            read()


def positions_of(path: Path) -> dict[str, int]:
    """Returns the position of each tensor's last byte in a shard."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header))
    ends = {name: entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"}
    return {name: 8 + header + end - 1 for name, end in ends.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_aux"])
def test_a_flipped_bit_anywhere_is_named_before_it_is_given_to_anybody(tmp_path: Path, dtype: str) -> None:
    make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=(0, 2), dtype=dtype))
    path = tmp_path / "shard_00002.safetensors"
    positions = positions_of(path)
    on_opening = {"length": 3, "header": 200}
    for name in sorted(positions):
        if name.startswith("document_") or name == "loss_mask":
            on_opening[name] = positions.pop(name)
    assert len(on_opening) == 6 and {"hidden_states", "aux_hidden_states", "input_ids"} <= set(positions)
    assert ("aux_hidden_states_scales" in positions) == (dtype != "bfloat16")
    assert ("hidden_states_scales" in positions) == (dtype == "fp8")
    of_index = rf"{path}: the checksum of header, tables and loss mask of shard 2 must be [0-9a-f]{{32}}, but"
    for position in on_opening.values():
        flip_bit(path, position)
        with pytest.raises(UserError, match=of_index):
            _ = HiddenStore.open(tmp_path).document_lengths
        flip_bit(path, position)
    of_document = (
        rf"{path}: the checksum of the document with id 107 must be [0-9a-f]{{32}}, but is .*delete the shard's file "
        r"and run .*verify=true"
    )
    for position in positions.values():  # positions in document 7, the last of the shard
        flip_bit(path, position)
        store = HiddenStore.open(tmp_path)
        assert store.document_lengths.tolist() == LENGTHS.tolist() and store.document(6) and store.document(8)
        with pytest.raises(UserError, match=of_document):
            store.document(7)
        flip_bit(path, position)
    assert HiddenStore.open(tmp_path).document(7)


def test_opening_reads_no_states(tmp_path: Path) -> None:
    """Opening a store of terabytes must be fast, so it reads no states and succeeds even if they are damaged."""
    make_store(tmp_path)
    path = tmp_path / "shard_00001.safetensors"
    positions = positions_of(path)
    for position in range(positions["input_ids"] + 1, positions["hidden_states"] + 1):
        flip_bit(path, position)
    store = HiddenStore.open(tmp_path, IDENTITY)
    assert store.document_lengths.tolist() == LENGTHS.tolist()
    assert len(list(store.loss_masks())) == 4 and len(store.document_ids) == 9
    assert store.mapped_document(4).document_id == 104
    with pytest.raises(UserError, match="the checksum of the document with id 104"):
        store.document(4)


DAMAGED_MANIFESTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text('{"schema_version": 2, "shards": ['), "must be JSON, but is not"),
    (lambda path: path.write_text("{}"), "must have the entry seal, but lacks it: .*an older version wrote it"),
    (lambda path: seal_again(path, schema_version=1), "schema_version must be 2, but is 1"),
    (lambda path: seal_again(path, schema_version=2, shards=...), "must be as .* writes it, but lacks shards"),
]


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    whole = (tmp_path / "manifest.json").read_bytes()
    for damage, message in DAMAGED_MANIFESTS:
        (tmp_path / "manifest.json").write_bytes(whole)
        damage(tmp_path / "manifest.json")
        with pytest.raises(UserError, match=rf"manifest.json: {message}.*; delete {tmp_path} and run mtptrain hidden"):
            HiddenStore.open(tmp_path)


def test_a_shard_that_training_deletes_while_it_is_looked_at_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("num_documents", "num_tokens", "num_supervised_tokens", "num_bytes", "index_bytes"), 1)
    hashes = {"file": "shard_00000.safetensors", "sha256": "", "index_checksum": ""}
    write_sealed(tmp_path / "shard_00000.json", {**counts, **hashes})
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as if the shard were deleted right after this check
    assert read_record(tmp_path, 0) is None
