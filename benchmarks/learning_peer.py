"""Runs the trainer of vLLM Speculators 0.9 on a CPU: `benchmarks.learning` starts this with a Python that has it.

Arguments are the trainer's own. The last line of stdout is JSON: the steps and the seconds of the epoch.
"""

import json
import time
from contextlib import redirect_stdout
from sys import stderr
from unittest.mock import patch

import torch
from speculators.train.cli import main
from speculators.train.config import TrainConfig
from speculators.train.trainer import Trainer


class TrainerOnCpu(Trainer):  # type: ignore[misc]  # its package is not installed here
    """The trainer with a processor in place of its accelerator's index, and the time of its epoch."""

    def setup_trainer(self) -> None:
        self.local_rank, self.device_type = "cpu", "cpu"
        super().setup_trainer()

    def train_epoch(self, epoch: int, **callback: object) -> None:
        started = time.perf_counter()
        super().train_epoch(epoch, **callback)
        measured.update(steps=self.global_step, seconds=time.perf_counter() - started)


measured: dict[str, float] = {}

if __name__ == "__main__":
    with (
        redirect_stdout(stderr),
        patch("speculators.train.cli.Trainer", TrainerOnCpu),
        patch.object(torch.accelerator, "synchronize", lambda: None),
    ):
        main(TrainConfig.resolve())
    print(json.dumps(measured))
