"""Tests that unfinished stores, written by one process or in parts, are completed with the same bytes."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mtptrain.hidden_states import writer
from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.hidden_states.writer import begin_store, finish_store, finished_shards, shard_ranges
from mtptrain.utils.errors import UserError
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


def test_an_unfinished_store_is_refused_for_reading(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest.json: must exist, but it does not; run mtptrain hidden-states"):
        HiddenStore.open(tmp_path)
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    with pytest.raises(UserError, match=r"manifest.json: must exist, but the extraction is unfinished; run mtptrain"):
        HiddenStore.open(tmp_path, IDENTITY)


def test_only_shards_with_a_record_and_their_full_length_are_trusted(tmp_path: Path) -> None:
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    for index, documents in enumerate(shard_ranges(LENGTHS, SHARD_TOKENS)[:3]):
        write_shard(tmp_path, index, make_shard(index, documents))
    os.truncate(tmp_path / "shard_00000.safetensors", 100)
    (tmp_path / "shard_00001.json").unlink()  # as if the run had been killed before it wrote the record
    (tmp_path / "shard_00003.safetensors.node.77.tmp").write_bytes(b"half")
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    assert finished_shards(tmp_path, range(4)) == {2}
    assert sorted(read_all(tmp_path)) == ["plan.json", "shard_00002.json", "shard_00002.safetensors"]


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_somebody_else_has_put_into_a_store_stays(tmp_path: Path, is_finished: bool) -> None:
    names = ["notes.tmp", "shard_00001.notes.txt", "shard_99999.json", "shard_000001.json", "mtptrain_notes.tmp"]
    if is_finished:
        make_store(tmp_path)
    for name in names:
        (tmp_path / name).write_text("mine")
    if is_finished:
        assert begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD) is not None
    else:
        make_store(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "mine")


def test_resuming_reads_no_byte_of_a_finished_shard(tmp_path: Path) -> None:
    """Resuming trusts the record, written after the shard is on disk, because hashing terabytes is slow."""
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    path = tmp_path / "shard_00000.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    assert finished_shards(tmp_path, range(4)) == {0}


def test_a_kill_before_the_rename_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    assert not (tmp_path / "shard_00000.safetensors").exists()
    assert not finished_shards(tmp_path, [0])


def test_a_kill_right_after_the_manifest_leaves_a_finished_store(tmp_path: Path) -> None:
    make_store(tmp_path)
    expected = read_all(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "shard_00000.json").write_text("{}")
    assert begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD) == HiddenStore.open(tmp_path).manifest
    assert read_all(tmp_path) == expected


def test_two_parts_may_reopen_a_store_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_store(tmp_path)
    expected = read_all(tmp_path)
    (tmp_path / "shard_00001.safetensors").unlink()
    write_plan = writer._write_plan

    def after_the_other_part(directory: Path, *rest: Any) -> None:
        monkeypatch.undo()
        assert begin_store(directory, IDENTITY, SHARD_TOKENS, range(1, 4, 2)) is None
        write_plan(directory, *rest)

    monkeypatch.setattr(writer, "_write_plan", after_the_other_part)
    assert begin_store(tmp_path, IDENTITY, SHARD_TOKENS, range(0, 4, 2)) is None
    write_shard(tmp_path, 1, shards[1])
    finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)
    assert read_all(tmp_path) == expected


def test_parts_share_the_shards_and_the_last_one_finishes_the_store(tmp_path: Path) -> None:
    shards = make_store(tmp_path / "whole")
    directory = tmp_path / "parts"
    for part in range(2):
        assert begin_store(directory, IDENTITY, SHARD_TOKENS, range(part, 4, 2)) is None
    write_shard(directory, 1, shards[1])
    (directory / "shard_00003.safetensors.node.77.tmp").write_bytes(b"being written")
    begin_store(directory, IDENTITY, SHARD_TOKENS, range(0, 4, 2))
    assert (directory / "shard_00003.safetensors.node.77.tmp").exists(), "another part is still writing this file"
    (directory / "shard_00003.safetensors.node.77.tmp").unlink()
    for index in (0, 2):
        write_shard(directory, index, shards[index])
    assert finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    assert finished_shards(directory, range(4)) == {0, 1, 2}
    write_shard(directory, 3, shards[3])
    manifests = [finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) for _ in range(2)]
    assert manifests[0] == manifests[1], "a second part that ends at the same time must return the same manifest"
    assert read_all(directory) == read_all(tmp_path / "whole")


def test_a_part_that_begins_while_another_finishes_keeps_what_is_there(tmp_path: Path) -> None:
    """The part that finishes the store removes the records, so the other part must read the manifest."""
    make_store(tmp_path / "whole")
    shards = make_store(tmp_path / "parts")
    (tmp_path / "parts" / "shard_00000.safetensors").unlink()
    assert begin_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, range(0, 4, 2)) is None
    write_shard(tmp_path / "parts", 0, shards[0])
    assert begin_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, range(1, 4, 2)) is None
    assert finish_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is not None
    assert finished_shards(tmp_path / "parts", [1, 3]) == {1, 3}, "the part must find both shards in the manifest"
    write_shard(tmp_path / "parts", 3, shards[3])
    assert finish_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is not None
    assert read_all(tmp_path / "parts") == read_all(tmp_path / "whole")


def test_no_part_finishes_over_a_shard_that_another_must_write_again(tmp_path: Path) -> None:
    shards = make_store(tmp_path)
    (tmp_path / "shard_00001.safetensors").unlink()
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, range(0, 4, 2))
    assert finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    write_shard(tmp_path, 1, shards[1])
    (tmp_path / "shard_00003.safetensors").unlink()  # as if the shard were lost after its record was written
    assert finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    write_shard(tmp_path, 3, shards[3])
    manifest = finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)
    assert manifest is not None
    assert not find_damage(HiddenStore(tmp_path, manifest), show_progress=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", ["hidden_states", "aux_hidden_states"])
def test_states_that_are_not_finite_stop_the_run_with_their_document(tmp_path: Path, name: str, dtype: str) -> None:
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    for value in (float("nan"), float("inf"), float("-inf")):
        tensors = make_shard(0, range(0, 3), num_captured=2)
        tensors[name][LENGTHS[0] + 1, ..., 3] = value
        message = r"shard_00000.safetensors: hidden states must be finite, but those of document 101 of"
        with pytest.raises(UserError, match=message):
            write_shard(tmp_path, 0, tensors, dtype)


def test_a_shard_without_room_is_discarded_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    assert sorted(read_all(tmp_path)) == ["plan.json"]
