"""Tests extraction and training at the same time, with a store that is deleted as training reads it."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mtptrain.config import PipelineConfig, TrainConfig
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.stream import (
    OPEN_WINDOWS,
    STREAM,
    StreamedStates,
    document_order,
    missing_open_shards,
    released_windows,
    shard_windows,
)
from mtptrain.train import count_steps
from mtptrain.utils.distributed import EXIT_STOPPED, STOP_SIGNALS, Ranks, StopSignal
from mtptrain.utils.errors import UserError
from tests.conftest import Run, start_program
from tests.mtptrain.train.runs import copy_of, head_bytes, records
from tests.programs import StartedProgram, wait_until

STREAMED = ("train.stream=true", "train.stream_shards=2", "hidden_states.shard_tokens=1500", "train.epochs=1")
STREAMED += ("train.max_steps=0", "train.micro_batches_per_step=1", "deepspeed=zero0")


def test_every_document_comes_once_window_after_window() -> None:
    shards = [range(first, first + 5) for first in range(0, 50, 5)]
    windows = shard_windows(len(shards), 3, seed=0)
    assert sorted(shard for window in windows for shard in window) == list(range(10))
    assert [len(window) for window in windows] == [3, 3, 3, 1]
    order = document_order(windows, shards, seed=0)
    assert sorted(order.tolist()) == list(range(50))
    assert {int(index) // 5 for index in order[:15]} == set(windows[0])
    assert order[:15].tolist() != sorted(order[:15].tolist()), "the documents of a window must be shuffled"
    assert not np.array_equal(order, document_order(shard_windows(10, 3, seed=1), shards, seed=1))


@contextmanager
def running(run: Run, *settings: str) -> Iterator[list[StartedProgram]]:
    """Starts extraction and training, and kills both at the end of the block."""
    programs = [start_program(name, *run[1], *settings) for name in ("hidden-states", "train")]
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()


@pytest.fixture
def stream_run(tiny_run: Run, tmp_path: Path) -> Run:
    """Returns a run folder that holds only prompts, and its overrides."""
    run_dir, overrides = tiny_run
    shutil.copytree(run_dir / "prompts", tmp_path / "run" / "prompts")
    return tmp_path / "run", (f"run_dir={tmp_path}/run", *overrides, *STREAMED)


def stream(run: Run, most_shards: int = sys.maxsize) -> list[float]:
    """Runs extraction and training until both end, and checks how many shards they have. Returns the losses."""
    store_dir = run[0] / "hidden_states"
    with running(run) as programs:
        while any(program.is_running for program in programs):
            assert len(list(store_dir.glob("shard_*.safetensors"))) <= most_shards
            time.sleep(0.005)
        for program in programs:
            result = program.result()
            assert result.returncode == 0, result.stderr[-3000:]
    assert not list(store_dir.glob("shard_*")), "every shard must be deleted after training"
    return losses(run[0])


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in records(run_dir)]


def test_a_streamed_run_trains_on_every_document_with_a_bounded_store(stream_run: Run) -> None:
    trained = stream(stream_run, most_shards=OPEN_WINDOWS * 2)
    num_windows = json.loads((stream_run[0] / "hidden_states" / STREAM).read_text())["released_windows"]
    assert num_windows > OPEN_WINDOWS, "the open windows must not hold the whole store"
    assert len(trained) > num_windows and trained[-1] < 0.9 * trained[0]


@pytest.mark.slow
def test_a_stopped_and_killed_streamed_run_goes_on_with_the_same_losses(stream_run: Run, tmp_path: Path) -> None:
    """Training gets a signal while it waits for an extraction that was killed. Later, both are killed."""
    undisturbed_run = copy_of(stream_run, tmp_path / "undisturbed")
    undisturbed = stream(undisturbed_run)
    run_dir, stream_file = stream_run[0], stream_run[0] / "hidden_states" / STREAM
    with running(stream_run, "train.save_every=0") as (extraction, training):
        wait_until(lambda: bool(losses(run_dir)), training)
        extraction.kill()
        wait_until(lambda: "waiting for the shards of step" in training.errors_so_far(), training)
        training.signal(signal.SIGTERM)
        result, num_steps = training.result(), len(losses(run_dir))
        assert result.returncode == EXIT_STOPPED, result.stderr[-3000:]
    assert (run_dir / f"train/checkpoints/step_{num_steps:08d}/complete.json").is_file()
    released = json.loads(stream_file.read_text())["released_windows"]
    with running(stream_run) as programs:
        wait_until(lambda: json.loads(stream_file.read_text())["released_windows"] > released, *programs)
    assert len(losses(run_dir)) < len(undisturbed)
    assert stream(stream_run) == undisturbed
    assert head_bytes(stream_run) == head_bytes(undisturbed_run)


def documents_of(lengths: list[int]) -> Documents:
    return Documents.from_list([(i, np.zeros(n, np.int32), np.ones(n, np.uint8)) for i, n in enumerate(lengths)])


def streamed_store(directory: Path, num_documents: int, window_shards: int) -> StreamedStates:
    """Returns states whose documents have ten tokens and whose shards have two documents. None of it is on disk."""
    return StreamedStates(directory, documents_of([10] * num_documents), 20, window_shards, seed=0)


def test_windows_are_released_after_the_last_step_that_reads_them(tmp_path: Path) -> None:
    store = streamed_store(tmp_path, num_documents=20, window_shards=2)  # five windows of four documents
    order = store.order.tolist()
    order[3], order[4] = order[4], order[3]  # swap the last document of window 0 with the first of 1
    store.set_steps([[order[first : first + 2], order[first + 2 : first + 4]] for first in range(0, 20, 4)])
    assert [store.num_finished_windows(step) for step in range(6)] == [0, 0, 2, 3, 4, 5]
    assert [step for step in range(1, 6) if store.frees_disk_after(step)] == [2, 3, 4, 5]
    # Training that starts again at step 0 must not leave the last windows on disk beside the first ones.
    for step, left in ((2, store.windows[2:]), (0, store.windows[:OPEN_WINDOWS])):
        for shard in range(10):
            (tmp_path / f"shard_{shard:05d}.safetensors").touch()
        store.release(step, is_last=False, is_first_rank=True)
        shards = {int(path.stem.removeprefix("shard_")) for path in tmp_path.glob("shard_*")}
        assert shards == {shard for window in left for shard in window}
        assert released_windows(tmp_path, store.windows) == step
    other = streamed_store(tmp_path, num_documents=20, window_shards=1)
    message = r"stream\.json: the shards of each window must be \[\d+\], \.\.\., but are .*; delete this file"
    with pytest.raises(ValueError, match=message):
        missing_open_shards(tmp_path, other.windows)
    with pytest.raises(UserError, match=r"train\.stream_shards: 3 windows must hold all documents of a step, but wind"):
        other.set_steps([[other.order.tolist()]])
    store.release(3, is_last=True, is_first_rank=True)
    assert not list(tmp_path.glob("shard_*"))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restores the handlers that a `StopSignal` replaces."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def open_stream(directory: Path, rank: int = 0) -> StreamedStates:
    target, ranks = TargetIdentity("t", None, "a", "b", "c", "d"), Ranks(rank, 1, 0)
    identity = StoreIdentity(target, (), "float32", "e")
    return StreamedStates.open(directory, identity, documents_of([10]), 20, 1, 0, ranks, StopSignal(ranks))


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("rank", [0, 1])
def test_training_that_waits_for_a_store_that_never_comes_ends_at_a_stop_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr("mtptrain.hidden_states.stream.REPORT_AFTER_S", 0.0)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    with pytest.raises(SystemExit) as ended:
        open_stream(tmp_path, rank)
    assert ended.value.code == EXIT_STOPPED
    message = f"waiting for {tmp_path}/plan.json from mtptrain hidden-states, which must run with the same settings"
    assert (message in capsys.readouterr().err) == (rank == 0), "one rank must speak for all"
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"train\.stream: must be false if the hidden states are finished"):
        open_stream(tmp_path)


def test_streaming_takes_one_epoch_and_one_part(config_for: Callable[..., PipelineConfig]) -> None:
    for setting in ("train.epochs=2", "hidden_states.num_parts=2"):
        with pytest.raises(UserError, match=rf"{setting[:-2]}: must be 1 with train\.stream=true"):
            config_for("train.stream=true", "train.epochs=1", setting)
    with pytest.raises(UserError, match=r"train\.max_steps: must be at most 7, the steps of one epoch"):
        count_steps(TrainConfig(stream=True, max_steps=8), 7)
    assert count_steps(TrainConfig(stream=True, max_steps=5), 7) == 5
