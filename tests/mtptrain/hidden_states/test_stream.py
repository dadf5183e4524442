"""Tests extraction and training at the same time, with a store that is deleted as training reads it."""

import json
import os
import shutil
import signal
import subprocess
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
from tests.conftest import Run, program_command
from tests.data_prep.hidden_states.stage import ONE_RANK
from tests.programs import TIMEOUT_S

ROOT = Path(__file__).parents[3]
STREAMED = (
    "train.stream=true",
    "train.stream_shards=2",
    "hidden_states.shard_tokens=1500",
    "train.epochs=1",
    "train.max_steps=0",
    "train.micro_batches_per_step=1",
    "deepspeed=zero0",
)


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


class Observer:
    """Records in a thread the largest number of finished shards that a store holds."""

    def __init__(self, store_dir: Path) -> None:
        self.most, self._store_dir, self._stop = 0, store_dir, threading.Event()
        self._thread = threading.Thread(target=self._count)

    def _count(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, len(list(self._store_dir.glob("shard_*.safetensors"))))
            time.sleep(0.005)

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def running(overrides: tuple[str, ...], log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts extraction and training, and kills both at the end of the block."""
    with log.open("ab") as file:
        modules = ("hidden-states", "train")
        processes = [
            subprocess.Popen(program_command(module, *overrides), cwd=ROOT, stdout=file, stderr=file)
            for module in modules
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def stream_run(tiny_run: Run, tmp_path: Path) -> Run:
    """Returns a run folder that holds only prompts, and its overrides."""
    run_dir, overrides = tiny_run
    shutil.copytree(run_dir / "prompts", tmp_path / "run" / "prompts")
    return tmp_path / "run", (f"run_dir={tmp_path}/run", *overrides, *STREAMED)


def stream(run: Run, log: Path) -> None:
    """Runs extraction and training until both end."""
    with running(run[1], log) as processes:
        for process in processes:
            assert process.wait(timeout=TIMEOUT_S) == 0, log.read_text()[-3000:]


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "train/metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def test_a_streamed_run_that_is_killed_goes_on_with_the_same_losses_and_a_bounded_store(
    stream_run: Run, tmp_path: Path
) -> None:
    run_dir, overrides = stream_run
    store_dir, log = run_dir / "hidden_states", tmp_path / "log"
    with Observer(store_dir) as observer:
        stream(stream_run, log)
    undisturbed, head = losses(run_dir), (run_dir / "train/last/head.safetensors").read_bytes()
    num_windows = json.loads((store_dir / STREAM).read_text())["released_windows"]
    assert num_windows > OPEN_WINDOWS, "the open windows must not hold the whole store"
    assert 0 < observer.most <= OPEN_WINDOWS * 2
    assert not list(store_dir.glob("shard_*")), "every shard must be deleted after training"

    shutil.rmtree(run_dir / "train")
    shutil.rmtree(store_dir)
    with running(overrides, log) as processes:
        while not (store_dir / STREAM).exists() or not json.loads((store_dir / STREAM).read_text())["released_windows"]:
            assert all(process.poll() is None for process in processes), log.read_text()[-3000:]
            time.sleep(0.01)
    assert len(losses(run_dir)) < len(undisturbed)
    stream(stream_run, log)
    assert losses(run_dir) == undisturbed
    assert (run_dir / "train/last/head.safetensors").read_bytes() == head


def test_a_signal_while_training_waits_for_extraction_saves_a_checkpoint(stream_run: Run, tmp_path: Path) -> None:
    run_dir, overrides = stream_run
    log = tmp_path / "log"
    with running((*overrides, "train.save_every=0"), log) as (extraction, training):
        while not (run_dir / "train/metrics.jsonl").exists() or not losses(run_dir):
            assert training.poll() is None, log.read_text()[-3000:]
            time.sleep(0.01)
        extraction.kill()
        while b"waiting for the shards of step" not in log.read_bytes():
            assert training.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        training.send_signal(signal.SIGTERM)
        assert training.wait(timeout=20) == 75, log.read_text()[-3000:]
    assert (run_dir / f"train/checkpoints/step_{len(losses(run_dir)):08d}/complete.json").is_file()


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
    store.release(3, is_last=True, is_first_rank=True)
    assert not list(tmp_path.glob("shard_*"))


def test_steps_that_need_more_windows_than_the_disk_holds_are_refused(tmp_path: Path) -> None:
    store = streamed_store(tmp_path, num_documents=20, window_shards=1)
    with pytest.raises(
        ValueError, match=r"train\.stream_shards: 3 windows must hold all documents of a step, but windows of 1 s"
    ):
        store.set_steps([[store.order.tolist()]])


def test_a_finished_store_is_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    identity = StoreIdentity(TargetIdentity("t", None, "a", "b", "c", "d"), (), "float32", "e")
    with pytest.raises(ValueError, match=r"train\.stream: must be false if the hidden states are finished"):
        StreamedStates.open(tmp_path, identity, documents_of([10]), 20, 1, 0, ONE_RANK, StopSignal(ONE_RANK))


@pytest.mark.parametrize("rank", [0, 1])
def test_training_that_waits_for_a_store_that_never_comes_ends_at_a_stop_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr("mtptrain.hidden_states.stream.REPORT_AFTER_S", 0.0)
    identity = StoreIdentity(TargetIdentity("t", None, "a", "b", "c", "d"), (), "float32", "e")
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        stop = StopSignal(ONE_RANK)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(SystemExit) as ended:
            StreamedStates.open(tmp_path, identity, documents_of([10]), 20, 1, 0, Ranks(rank, 1, 0), stop)
        assert ended.value.code == EXIT_STOPPED
        message = f"waiting for {tmp_path}/plan.json from mtptrain hidden-states, which must run with the same settings"
        assert (message in capsys.readouterr().err) == (rank == 0), "one rank must speak for all"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("setting", ["train.epochs=2", "hidden_states.num_parts=2"])
def test_streaming_takes_one_epoch_and_one_part(config_for: Callable[..., PipelineConfig], setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(ValueError, match=rf"{name}: must be 1 with train\.stream=true"):
        config_for("train.stream=true", "train.epochs=1", setting)


def test_steps_beyond_the_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.max_steps: must be at most 7, the steps of one epoch"):
        count_steps(TrainConfig(stream=True, max_steps=8), 7)
    assert count_steps(TrainConfig(stream=True, max_steps=5), 7) == 5
