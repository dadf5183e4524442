"""What a run did with its time, and with the memory of its GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtptrain.training.flops import StepFlops
from mtptrain.training.metrics import StepMeter
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import Ranks


class BusyClock(PhaseClock):
    """A device that was at work in all but a millionth of the time."""

    def read(self) -> dict[str, float]:
        return {"forward": 1e6}


@pytest.mark.parametrize(("clock", "is_lost"), [(BusyClock, False), (PhaseClock, True)])
def test_waiting_for_data_while_the_device_is_busy_costs_nothing(clock: type[PhaseClock], is_lost: bool) -> None:
    cpu = torch.device("cpu")
    meter = StepMeter(cpu, clock(cpu), StepFlops(1, 1, 1), 1e12)
    while not meter._data_wait_s:
        meter.data_arrived()
    assert (meter.read(Ranks(0, 1, 0))["data_wait_share"] > 0) == is_lost


START_OF_TRAINING = """
import os, sys
sys.modules["hydra"] = None  # the program ends at its first import of a package
try:
    import mtptrain.train
except ImportError:
    print(os.environ.get("PYTORCH_ALLOC_CONF"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
    ],
)
def test_the_allocator_is_set_before_training_does_anything_else(given: dict[str, str], expected: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        [sys.executable, "-c", START_OF_TRAINING],
        cwd=Path(__file__).parents[3],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == expected
