"""Tests that a store gives back what was written, and that it takes little disk space and memory."""

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mtptrain.config import StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.fp8 import encode
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.hidden_states.writer import begin_store, read_record, shard_ranges
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.mtptrain.hidden_states.small_store import (
    EVERY_SHARD,
    HIDDEN_SIZE,
    IDENTITY,
    LENGTHS,
    SHARD_TOKENS,
    TARGET,
    make_store,
    read_all,
)
from tests.sealed import flip_bit, seal_again

LAST, CAPTURED = "hidden_states", "aux_hidden_states"


def test_a_shard_ends_with_the_document_that_reaches_its_tokens() -> None:
    assert shard_ranges(LENGTHS, 20) == [range(0, 3), range(3, 5), range(5, 8), range(8, 9)]
    assert shard_ranges(LENGTHS, 1) == [range(i, i + 1) for i in range(9)]
    assert shard_ranges(LENGTHS, 10_000) == [range(0, 9)]
    assert shard_ranges(np.array([10, 10]), 10) == [range(0, 1), range(1, 2)]


DTYPES = [
    ((), "bfloat16", (), 2 * HIDDEN_SIZE),
    ((0, 2), "bfloat16", (), 3 * 2 * HIDDEN_SIZE),
    ((), "fp8", (LAST,), HIDDEN_SIZE + 4),
    ((0, 2), "fp8", (LAST, CAPTURED), 3 * (HIDDEN_SIZE + 4)),
    ((0, 2), "fp8_aux", (CAPTURED,), 2 * HIDDEN_SIZE + 2 * (HIDDEN_SIZE + 4)),
]
"""Captured layers, stored dtype, the tensors of eight bits, and the bytes of the states of a token."""


def test_a_store_gives_back_what_was_written_and_a_token_costs_what_bytes_per_token_says(tmp_path: Path) -> None:
    for number, (captured, dtype, eight_bits, state_bytes) in enumerate(DTYPES):
        directory = tmp_path / str(number)
        shards = make_store(directory, replace(IDENTITY, capture_layers=captured, dtype=dtype))
        assert sorted(read_all(directory)) == ["manifest.json", *(f"shard_{i:05d}.safetensors" for i in range(4))]
        store = HiddenStore.open(directory)
        assert store.document_lengths.tolist() == LENGTHS.tolist()
        assert store.document_ids.tolist() == list(range(100, 109))
        masks = [(mask.tolist(), offsets.tolist()) for mask, offsets in store.loss_masks()]
        assert masks == [(shard["loss_mask"].tolist(), shard["document_offsets"].tolist()) for shard in shards]
        manifest, num_supervised = store.manifest, sum(int(shard["loss_mask"].sum()) for shard in shards)
        assert (manifest.num_tokens, manifest.num_supervised_tokens) == (LENGTHS.sum(), num_supervised)

        written = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0] if "document" not in name}
        for index, end in enumerate(np.cumsum(LENGTHS)):
            document = store.document(index)
            assert document.document_id == 100 + index and (document.aux_hidden_states is None) == (not captured)
            for name, tensor in written.items():
                stored, expected = getattr(document, name), tensor[end - LENGTHS[index] : end]
                scales = getattr(document, f"{name}_scales", None)
                if name in eight_bits:
                    values, expected_scales = encode(expected)
                    assert stored.dtype is torch.float8_e4m3fn and torch.equal(stored.float(), values.float())
                    assert torch.equal(scales, expected_scales)
                else:
                    assert stored.dtype is expected.dtype and torch.equal(stored, expected) and scales is None

        assert bytes_per_token(HIDDEN_SIZE, len(captured), StoreDtype(dtype)) == state_bytes + 4 + 1
        for record in manifest.shards:
            rest = record.num_bytes - record.num_tokens * (state_bytes + 4 + 1) - 8 * (4 * record.num_documents + 1)
            assert 0 < rest < 900, "only the header may remain"


def test_documents_are_views_of_the_mapped_file_and_shards_are_opened_when_needed(tmp_path: Path) -> None:
    make_store(tmp_path)
    open_files = len(os.listdir("/proc/self/fd"))
    store = HiddenStore.open(tmp_path)
    for name in ("shard_00000", "shard_00001", "shard_00003"):
        (tmp_path / f"{name}.safetensors").unlink()
    document = store.document(6)  # in shard 2, after document 5, which has two tokens
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert document.hidden_states.data_ptr() == store.document(6).hidden_states.data_ptr()
    assert document.hidden_states.storage_offset() == 2 * HIDDEN_SIZE
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "shard_00002.safetensors") in mapped and "shard_00001" not in mapped


def test_verify_names_a_shard_with_a_flipped_bit_and_one_that_is_truncated_or_missing(tmp_path: Path) -> None:
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    assert not find_damage(store)
    flip_bit(tmp_path / "shard_00003.safetensors", -1)
    assert not find_damage(store, shards=[0, 1, 2])
    sha256 = store.manifest.shards[3].sha256
    path = tmp_path / "shard_00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    for problem in (r"must have \d+ bytes, but has \d+", r"must have \d+ bytes, but does not exist"):
        damage, message = find_damage(store), rf"{path}: shard 1 {problem}; run mtptrain hidden-states"
        assert sorted(damage) == [1, 3] and re.search(message, damage[1])
        assert re.search(rf"the sha256 of shard 3 must be {sha256}, but is .*delete the shard's fi", damage[3])
        for read in (
            lambda: HiddenStore(tmp_path, store.manifest).document(4),
            lambda: HiddenStore.open(tmp_path, IDENTITY),
        ):
            with pytest.raises(UserError, match=message):
                read()
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_aux"])
def test_a_flipped_bit_anywhere_is_named_before_it_is_given_to_anybody(tmp_path: Path, dtype: str) -> None:
    identity = replace(IDENTITY, capture_layers=(0, 2), dtype=dtype)
    make_store(tmp_path, identity)
    path = tmp_path / "shard_00002.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    entries = json.loads(path.read_bytes()[8 : 8 + header])
    ends = {name: entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"}
    positions = {name: 8 + header + end - 1 for name, end in ends.items()}  # of each tensor's last byte
    on_opening = {name for name in positions if name.startswith("document_") or name == "loss_mask"}
    assert len(on_opening) == 4 and {"hidden_states", "aux_hidden_states", "input_ids"} <= positions.keys()
    assert ("aux_hidden_states_scales" in positions) == (dtype != "bfloat16")
    assert ("hidden_states_scales" in positions) == (dtype == "fp8")
    of_index = rf"{path}: the checksum of header, tables and loss mask of shard 2 must be [0-9a-f]{{32}}, but"
    for position in (3, 200, *map(positions.pop, on_opening)):  # 3 is in the header's length, 200 in the header
        flip_bit(path, position)
        with pytest.raises(UserError, match=of_index):
            _ = HiddenStore.open(tmp_path).document_lengths
        assert list(find_damage(HiddenStore.open(tmp_path), show_progress=False)) == [2]
        flip_bit(path, position)
    of_document = (
        rf"{path}: the checksum of the document with id 107 must be [0-9a-f]{{32}}, but is .*run .*mtptrain verify"
    )
    for position in positions.values():  # in document 7, the last of the shard: opening a store reads no states
        flip_bit(path, position)
        store = HiddenStore.open(tmp_path, identity)
        assert len(list(store.loss_masks())) == 4
        assert store.document_lengths.tolist() == LENGTHS.tolist() and store.document(6) and store.document(8)
        with pytest.raises(UserError, match=of_document):
            store.document(7)
        flip_bit(path, position)
    assert HiddenStore.open(tmp_path).document(7)


def test_a_shard_that_training_deletes_while_it_is_looked_at_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("num_documents", "num_tokens", "num_supervised_tokens", "num_bytes", "index_bytes"), 1)
    hashes = {"file": "shard_00000.safetensors", "sha256": "", "index_checksum": ""}
    write_sealed(tmp_path / "shard_00000.json", {**counts, **hashes})
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as if the shard were deleted right after this check
    assert read_record(tmp_path, 0) is None


def names_of(identity: type[StoreIdentity | TargetIdentity]) -> list[str]:
    """Returns the fields of which none may differ."""
    return [field.name for field in fields(identity) if field.name not in ("target", "path", "revision")]


def test_states_of_something_else_are_refused_with_every_reason_at_once(tmp_path: Path) -> None:
    others = [replace(IDENTITY, target=replace(TARGET, **{name: "x"})) for name in names_of(TargetIdentity)]
    others += [replace(IDENTITY, **{name: ("x",)}) for name in names_of(StoreIdentity)]
    unfinished, finished = tmp_path / "unfinished", tmp_path / "finished"
    begin_store(unfinished, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    make_store(finished)
    for other in others:
        [(what, value)] = other.facts().items() - IDENTITY.facts().items()
        reason = re.escape(f"{what} must be {value}, but is {IDENTITY.facts()[what]} (target expected: ")
        for directory, name in ((unfinished, "plan"), (finished, "manifest")):
            with pytest.raises(UserError, match=f"{name}.json: {reason}.*delete .* run mtptrain hidden-states again"):
                begin_store(directory, other, SHARD_TOKENS, EVERY_SHARD)
        with pytest.raises(UserError, match=f"manifest.json: {reason}"):
            HiddenStore.open(finished, other)
    tuned = replace(TARGET, weights_sha256="x", path="models/tuned")
    message = r"weights must be x, .* must be y, .*expected: models/tuned, found: models/llama"
    with pytest.raises(UserError, match=message):
        HiddenStore.open(finished, replace(IDENTITY, target=tuned, prompts_sha256="y"))
    moved = replace(TARGET, path="/elsewhere", revision="main")
    assert HiddenStore.open(finished, replace(IDENTITY, target=moved)).num_documents == len(LENGTHS)
    seal_again(finished / "manifest.json", schema_version=1)
    with pytest.raises(UserError, match=f"schema_version must be 2, but is 1; delete {finished} and run mtptrain hid"):
        HiddenStore.open(finished)
