"""Tests that unfinished stores, written by one process or in parts, are completed with the same bytes."""

import math
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from mtptrain.hidden_states.store import HiddenStore, StoreManifest, find_damage
from mtptrain.hidden_states.writer import begin_store, finish_store, finished_shards, shard_ranges
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.mtptrain.hidden_states.small_store import (
    EVERY_SHARD,
    HIDDEN_SIZE,
    IDENTITY,
    LENGTHS,
    SHARD_TOKENS,
    make_shard,
    make_store,
    read_all,
    write_shard,
)

EVEN, ODD = range(0, 4, 2), range(1, 4, 2)
"""The shards of two parts."""


def begin(directory: Path, shards: range = EVERY_SHARD) -> StoreManifest | None:
    return begin_store(directory, IDENTITY, SHARD_TOKENS, shards)


def finish(directory: Path) -> StoreManifest | None:
    return finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)


def test_an_unfinished_store_is_refused_and_only_shards_with_a_record_and_their_length_are_trusted(
    tmp_path: Path,
) -> None:
    """They are not read: hashing terabytes is slow, and the record is written after the shard is on disk."""
    with pytest.raises(UserError, match=r"manifest.json: must exist, but it does not; run mtptrain hidden-states"):
        HiddenStore.open(tmp_path)
    begin(tmp_path)
    for index, documents in enumerate(shard_ranges(LENGTHS, SHARD_TOKENS)[:3]):
        write_shard(tmp_path, index, make_shard(index, documents))
    with pytest.raises(UserError, match=r"manifest.json: must exist, but the extraction is unfinished; run mtptrain"):
        HiddenStore.open(tmp_path, IDENTITY)
    os.truncate(tmp_path / "shard_00000.safetensors", 100)
    (tmp_path / "shard_00001.json").unlink()  # as if the run had been killed before it wrote the record
    unread = tmp_path / "shard_00002.safetensors"
    unread.write_bytes(bytes(unread.stat().st_size))
    (tmp_path / "shard_00003.safetensors.node.77.tmp").write_bytes(b"half")
    begin(tmp_path)
    assert finished_shards(tmp_path, range(4)).keys() == {2}
    assert sorted(read_all(tmp_path)) == ["plan.json", "shard_00002.json", "shard_00002.safetensors"]


def test_what_somebody_else_has_put_into_a_store_stays(tmp_path: Path) -> None:
    names = ["notes.tmp", "shard_00001.notes.txt", "shard_99999.json", "shard_000001.json", "mtptrain_notes.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    make_store(tmp_path)
    assert begin(tmp_path) is not None
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "mine")


def test_a_kill_leaves_no_half_shard_and_right_after_the_manifest_a_finished_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    begin(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", killed)
        write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    assert not (tmp_path / "shard_00000.safetensors").exists() and not finished_shards(tmp_path, [0])
    make_store(tmp_path)
    expected = read_all(tmp_path)
    manifest = HiddenStore.open(tmp_path).manifest
    (tmp_path / "plan.json").write_text("{}")
    write_sealed(tmp_path / "shard_00000.json", asdict(manifest.shards[0]))
    assert begin(tmp_path) == manifest
    assert read_all(tmp_path) == expected


def test_parts_share_the_shards_and_the_last_one_finishes_the_store(tmp_path: Path) -> None:
    shards, parts = make_store(tmp_path / "whole"), tmp_path / "parts"
    whole = read_all(tmp_path / "whole")
    assert begin(parts, EVEN) is None and begin(parts, ODD) is None
    write_shard(parts, 1, shards[1])
    others = parts / "shard_00003.safetensors.node.77.tmp"
    others.write_bytes(b"being written")
    begin(parts, EVEN)
    assert others.exists(), "another part is still writing this file"
    others.unlink()
    for index in EVEN:
        write_shard(parts, index, shards[index])
    assert finish(parts) is None and finished_shards(parts, range(4)).keys() == {0, 1, 2}
    write_shard(parts, 3, shards[3])
    manifest = finish(parts)
    assert manifest == finish(parts), "a second part that ends at the same time must return the same manifest"
    assert read_all(parts) == whole
    # A shard that was lost is written again, with other bytes as on another machine, while other parts begin.
    (parts / "shard_00000.safetensors").unlink()
    assert begin(parts, EVEN) is None and finish(parts) is None
    assert finished_shards(parts, range(4)).keys() == {1, 2, 3} and not (parts / "manifest.json").exists()
    write_shard(parts, 0, make_shard(9, range(0, 3)))
    (parts / "shard_00002.safetensors").unlink()  # as if the shard were lost after its record was written
    assert finish(parts) is None
    write_shard(parts, 2, shards[2])
    assert begin(parts, ODD) is None and (manifest := finish(parts)) is not None
    assert begin(parts) == manifest and not find_damage(HiddenStore(parts, manifest), show_progress=False)
    assert read_all(parts).keys() == whole.keys() and read_all(parts) != whole


def test_states_that_are_not_finite_or_of_another_width_stop_the_run(tmp_path: Path) -> None:
    begin(tmp_path)
    values, names = (math.nan, math.inf, -math.inf), ("hidden_states", "aux_hidden_states")
    for value, name, dtype in product(values, names, ("bfloat16", "fp8")):
        tensors = make_shard(0, range(0, 3), num_captured=2)
        tensors[name][LENGTHS[0] + 1, ..., 3] = value
        message = r"shard_00000.safetensors: hidden states must be finite, but those of document 101 of"
        with pytest.raises(UserError, match=message):
            write_shard(tmp_path, 0, tensors, dtype)
    narrow = make_shard(0, range(0, 3)) | {"hidden_states": torch.zeros(21, HIDDEN_SIZE // 2)}
    with pytest.raises(AssertionError, match="streams of another document or target"):
        write_shard(tmp_path, 0, narrow)
