"""Metrics of a run: `metrics.jsonl` always, wandb beside it."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import wandb

from mtptrain.batches import Batch
from mtptrain.config import PipelineConfig, Tracker
from mtptrain.distributed import Ranks


class Tracking:
    """Writes one line per record; rank 0 alone has one."""

    def __init__(self, directory: Path, config: PipelineConfig, first_step: int) -> None:
        self.path = directory / "metrics.jsonl"
        # A resumed run repeats the steps since its checkpoint: what they wrote before goes.
        kept = [line for line in self._lines() if json.loads(line)["step"] <= first_step] if first_step else []
        self.path.write_text("".join(line + "\n" for line in kept))
        self._wandb = None
        if config.train.tracker is Tracker.wandb:
            os.environ.setdefault("WANDB_MODE", "offline")
            self._wandb = wandb.init(project="mtptrain", dir=directory, config=asdict(config), settings={"silent": True})

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.is_file() else []

    def write(self, step: int, metrics: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


class Meter:
    """Tokens per second and the time that steps waited for data, since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        self._started = self._step_ended = time.perf_counter()
        self._data_wait_s, self._tokens, self._drafts = 0.0, 0, 0.0

    def data_arrived(self) -> None:
        self._data_wait_s += time.perf_counter() - self._step_ended

    def step_done(self, batches: Sequence[Batch]) -> None:
        self._tokens += sum(batch.num_tokens for batch in batches)
        self._drafts += sum(float(batch.num_drafts[0]) for batch in batches)
        self._step_ended = time.perf_counter()

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Of all ranks together; starts anew."""
        seconds = time.perf_counter() - self._started
        counted = ranks.sum(torch.tensor([self._tokens, self._drafts, self._data_wait_s], dtype=torch.float64, device=self.device))
        tokens, drafts, data_wait_s = counted.tolist()
        self.restart()
        return {
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "supervised_tokens_per_s": drafts / seconds,
            "data_wait_share": data_wait_s / ranks.world_size / seconds,
        }
