"""Tests that the writer's threads write every document, hold a bounded number of states and lose no error."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.config import StoreDtype
from mtptrain.hidden_states.extraction import overlapped_writer
from mtptrain.hidden_states.extraction.overlapped_writer import OverlappedWriter
from mtptrain.hidden_states.writer import ShardFile, finished_shards

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


def write_whole(writer: OverlappedWriter, shard: ShardFile) -> None:
    writer.begin(shard)
    for document, states in enumerate(STATES):
        writer.write(document, states)
    writer.finish()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_shards_are_complete_at_the_end_while_the_caller_never_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    write, is_handed_over = ShardFile.write, threading.Event()

    def write_later(*args: Any) -> None:
        assert is_handed_over.wait(60), "the caller must not wait for the disk"
        write(*args)

    monkeypatch.setattr(ShardFile, "write", write_later)
    with OverlappedWriter(num_threads) as writer:
        for index in range(2):
            write_whole(writer, new_shard(tmp_path, index))
            is_handed_over.set()  # no thread could write states before the whole first shard was handed over
    assert finished_shards(tmp_path, [0, 1]) == {0, 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_any_number_of_threads_leaves_the_same_bytes(tmp_path: Path) -> None:
    for dtype in StoreDtype:
        for num_threads in (1, 4):
            with OverlappedWriter(num_threads) as writer:
                write_whole(writer, new_shard(tmp_path / f"{dtype}{num_threads}", dtype=dtype))
        one, other = ((tmp_path / f"{dtype}{n}/shard_00000.safetensors").read_bytes() for n in (1, 4))
        assert one == other


def test_no_more_states_wait_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_writer, "MAX_PENDING_BYTES", 2 * STATES[0].numel() * STATES.element_size())
    handed_over, written, most, write = 0, 0, 0, ShardFile.write

    def slow_write(*args: Any) -> None:
        nonlocal written
        time.sleep(0.01)
        write(*args)
        written += 1

    monkeypatch.setattr(ShardFile, "write", slow_write)
    with OverlappedWriter() as writer:
        writer.begin(new_shard(tmp_path))
        for document, states in enumerate(STATES):
            writer.write(document, states)
            handed_over += 1
            most = max(most, handed_over - written)
        writer.finish()
    assert most <= 2 and finished_shards(tmp_path, [0]) == {0}


def test_an_error_behind_the_callers_back_is_raised_and_no_error_leaves_half_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for failing in ("write", "finish"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(OSError, match="No space left on device"),
            OverlappedWriter() as writer,
        ):
            patch.setattr(ShardFile, failing, full)
            write_whole(writer, new_shard(tmp_path))
        assert list(tmp_path.iterdir()) == []
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the target failed"), OverlappedWriter() as writer:
        writer.begin(new_shard(tmp_path))
        writer.write(0, STATES[0])
        raise RuntimeError("the target failed")
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads
