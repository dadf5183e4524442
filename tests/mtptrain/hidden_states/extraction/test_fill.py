"""Tests that threads write every document, hold a bounded number of states and lose no error, and name a full disk."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mtptrain.config import Dtype, HiddenStatesConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.extraction import fill
from mtptrain.hidden_states.extraction.fill import OverlappedWriter, Streams, fill_shards
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from mtptrain.hidden_states.writer import ShardFile, finished_shards
from tests.mtptrain.hidden_states.small_store import read_all
from tests.programs import fake_python

NUM_DOCUMENTS, LENGTH, HIDDEN_SIZE = 6, 5, 8
STATES = torch.randn(NUM_DOCUMENTS, LENGTH, 2, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))


def new_shard(directory: Path, index: int = 0, dtype: StoreDtype = StoreDtype.bfloat16) -> ShardFile:
    size = NUM_DOCUMENTS * LENGTH
    tokens = {
        "input_ids": torch.zeros(size, dtype=torch.int32),
        "loss_mask": torch.ones(size, dtype=torch.uint8),
        "document_offsets": torch.arange(0, size + 1, LENGTH),
        "document_ids": torch.arange(NUM_DOCUMENTS),
    }
    directory.mkdir(exist_ok=True)
    return ShardFile(directory, index, tokens, HIDDEN_SIZE, 1, dtype)


def test_any_number_of_threads_leaves_the_same_complete_shards_while_the_caller_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_handed_over = ShardFile.write, threading.Event()

    def write_later(*args: Any) -> None:
        assert is_handed_over.wait(60), "the caller must not wait for the disk"
        write(*args)

    monkeypatch.setattr(ShardFile, "write", write_later)
    for dtype in StoreDtype:
        for num_threads in (1, 4):
            is_handed_over.clear()
            directory = tmp_path / f"{dtype}{num_threads}"
            with OverlappedWriter(num_threads) as writer:
                for index in range(2):
                    writer.write_shard(new_shard(directory, index, dtype), enumerate(STATES))
                    is_handed_over.set()  # no thread could write states before the whole first shard was handed over
            assert finished_shards(directory, [0, 1]).keys() == {0, 1} and not list(directory.glob("*.tmp"))
        assert read_all(tmp_path / f"{dtype}1") == read_all(tmp_path / f"{dtype}4")


def test_no_more_states_wait_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "MAX_PENDING_BYTES", 2 * STATES[0].numel() * STATES.element_size())
    written, most, write = 0, 0, ShardFile.write

    def slow_write(*args: Any) -> None:
        nonlocal written
        time.sleep(0.01)
        write(*args)
        written += 1

    def handed_over() -> Iterator[tuple[int, torch.Tensor]]:
        nonlocal most
        for document, states in enumerate(STATES):
            most = max(most, document - written)
            yield document, states

    monkeypatch.setattr(ShardFile, "write", slow_write)
    with OverlappedWriter() as writer:
        writer.write_shard(new_shard(tmp_path), handed_over())
    assert most == 2 and finished_shards(tmp_path, [0]).keys() == {0}


def test_an_error_in_a_thread_or_of_the_target_is_raised_and_leaves_no_half_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def failing_target() -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, STATES[0]
        raise RuntimeError("the target failed")

    for name in ("write", "finish"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(OSError, match="No space left on device"),
            OverlappedWriter() as writer,
        ):
            patch.setattr(ShardFile, name, full)
            writer.write_shard(new_shard(tmp_path), enumerate(STATES))
        assert list(tmp_path.iterdir()) == []
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the target failed"), OverlappedWriter() as writer:
        writer.write_shard(new_shard(tmp_path), failing_target())
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


def fill_one(streams: Streams, store_dir: Path) -> None:
    store_dir.mkdir(exist_ok=True)
    documents = Documents.from_list([(0, [1, 2, 3], [1, 1, 1])])
    fill_shards(streams, documents, {0: range(1)}, store_dir, HIDDEN_SIZE, 1, StoreDtype.bfloat16, "rank 0", show=False)


FULL_DISKS = {
    "scratch": "the disk of hidden_states.scratch_dir must hold the files of two shards, but is full",
    "store/mtptrain_0.tmp": "of hidden states from this process, but is full; finished shards are kept",
}


def test_a_full_disk_is_named_by_its_setting_unless_it_is_the_stores(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    script = '#!/bin/sh\n[ "$1" = -c ] && exit 0\nread -r settings\nread -r shard\n'
    python = fake_python(tmp_path, script + "echo 'OSError: [Errno 28] No space left on device' >&2\nexit 1\n")
    settings = HiddenStatesConfig(dtype=Dtype.float32)
    for place, message in FULL_DISKS.items():
        streams = VllmStreams(tiny_target, (1, 2), settings, 3, tmp_path / place, 0, str(python))
        with pytest.raises(OSError, match=message) as full, streams:
            fill_one(streams, tmp_path / "store")
        assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / place.partition("/")[0])

    def full_disk(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(OSError, match=r"must have room for 0\.000 GB of hidden states from this process") as full:
        fill_one(Mock(extract=lambda shards: iter([iter([])])), tmp_path / "store")
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "store")
