"""Tests the time spent waiting for data, the setting of the GPU allocator, and logging to wandb."""

import itertools
import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import wandb

from mtptrain.train import main
from mtptrain.training import flops
from mtptrain.training.flops import StepFlops, _now
from mtptrain.training.metrics import StepMeter, Tracking, start_wandb, track_report
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import Ranks
from tests.conftest import make_config


class BusyClock(PhaseClock):
    """Reports a device that was busy for longer than the whole test."""

    def read(self) -> dict[str, float]:
        return {"forward": 1e6}


CPU, ALONE = torch.device("cpu"), Ranks(0, 1, 0)


def test_waiting_for_data_while_the_device_is_busy_costs_nothing_and_an_mfu_is_never_above_one() -> None:
    for clock, is_lost in ((BusyClock, False), (PhaseClock, True)):
        meter = StepMeter(CPU, clock(CPU), StepFlops(1, 1, 1, 0), 1e12)
        while not meter._data_wait_s:
            meter.data_arrived()
        assert (meter.read(ALONE)["data_wait_share"] > 0) == is_lost
    meter = StepMeter(CPU, PhaseClock(CPU), StepFlops(1, 1, 1, 0), 1e-3)  # a peak that a busy machine made too low
    meter._flops = 1e6  # a step's, which takes less than the 1e9 seconds that the peak allows for
    assert meter.read(ALONE)["mfu"] == pytest.approx(1.0)
    meter._flops = 1.0  # a slower step is compared with the fastest
    assert 0 < meter.read(ALONE)["mfu"] < 1
    before = _now(CPU)
    time.sleep(0.1)  # as if other programs had the cores: only the time in which this process computes counts
    assert _now(CPU) - before < 0.05


def test_training_sets_the_allocator_before_it_looks_for_gpus_as_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtptrain.train.init_ranks", lambda *_: sys.exit(os.environ["PYTORCH_ALLOC_CONF"]))
    for users in (None, "backend:native"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is put back
        del os.environ["PYTORCH_ALLOC_CONF"]
        if users is not None:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", users)
        with pytest.raises(SystemExit, match=users or "expandable_segments:True"):
            main(make_config())


def written_by_wandb(directory: Path, *expected: bytes) -> bytes:
    """Returns the file of the only run, once wandb's process has written all expected parts."""
    path, deadline = next(directory.rglob("*.wandb")), time.monotonic() + 30
    while not all(part in path.read_bytes() for part in expected):
        assert time.monotonic() < deadline, path.read_bytes()
        time.sleep(0.05)
    return path.read_bytes()


def test_wandb_gets_one_curve_for_each_depth_and_the_report(tmp_path: Path) -> None:
    config = make_config(f"run_dir={tmp_path}", "train.tracker=wandb")
    tracking = Tracking(tmp_path, 0, start_wandb(tmp_path, config, "train"))
    tracking.write(10, {"loss": 1.5, "top1_accuracy_at": [0.5, 0.25], "acceptance_length": 2.0})
    tracking.close()
    page = tmp_path / "report.html"
    page.write_text("<p>")
    (tmp_path / "report").mkdir()
    track_report(tmp_path / "report", config, {"acceptance_rate_at": [0.75]}, [page])
    keys = (b"loss", b"top1_accuracy/depth_0", b"top1_accuracy/depth_1", b"ttt_steps", str(tmp_path).encode())
    training = written_by_wandb(tmp_path / "wandb", *keys)
    assert b"top1_accuracy_at" not in training
    written_by_wandb(tmp_path / "report/wandb", b"acceptance_rate/depth_0", b"report.html", str(tmp_path).encode())


def test_a_wandb_that_cannot_start_stops_training_at_once_and_leaves_a_finished_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(f"run_dir={tmp_path}")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("No API key configured.\nUse `x`.")))
    monkeypatch.setenv("WANDB_MODE", "online")
    message = r"train\.tracker: wandb must start with WANDB_MODE=online, but wandb reports UsageError: No API key"
    with pytest.raises(ValueError, match=message):
        start_wandb(tmp_path, config, "train")
    track_report(tmp_path, config, {}, [])
    assert "warning: the report is not logged to wandb" in capsys.readouterr().out


def test_the_peak_is_that_of_products_while_no_other_program_has_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some hundred short products, the first twelve here take a second of processor time each."""
    times = itertools.chain(range(24), itertools.count(24.0, 0.001))
    monkeypatch.setattr(flops, "_now", lambda device: next(times))
    assert flops._rate_of_products(16, torch.device("cpu"), torch.float32) == pytest.approx(2 * 16**3 / 0.001)
