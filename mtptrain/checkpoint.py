"""Checkpoints of a training run: head, optimizer, schedule, RNG and the step, which is the position in the data.

DeepSpeed writes the files of `checkpoints/step_00000100/`, each rank its part; `complete.json` is written last, by rank 0, and a
checkpoint without it does not count. The best head by acceptance lies in `best/` and is never rotated away.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine

from mtptrain.distributed import Ranks
from mtptrain.run_dir import write_json

MARKER = "complete.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    best_acceptance_length: float = 0.0


def complete_checkpoints(directory: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(marker.parent for marker in directory.glob(f"step_*/{MARKER}"))


def save_checkpoint(engine: DeepSpeedEngine, directory: Path, progress: Progress, keep: int, ranks: Ranks) -> None:
    """Write a checkpoint on all ranks, then remove all but the newest `keep`."""
    tag = f"step_{progress.step:08d}"
    client_state = {"step": progress.step, "best_acceptance_length": progress.best_acceptance_length, "rng": torch.get_rng_state()}
    engine.save_checkpoint(directory, tag=tag, client_state=client_state, save_latest=False)
    ranks.barrier()
    if ranks.is_first:
        write_json(directory / tag / MARKER, {"step": progress.step, "world_size": ranks.world_size})
        for old in complete_checkpoints(directory)[:-keep]:
            (old / MARKER).unlink()  # first, so that a kill in between leaves no half checkpoint that counts
            shutil.rmtree(old)
    ranks.barrier()


def load_checkpoint(engine: DeepSpeedEngine, directory: Path, ranks: Ranks) -> Progress:
    """Go on from the newest complete checkpoint; a run without one starts at step 0.

    Raises:
        ValueError: it was written by another number of ranks.
        RuntimeError: DeepSpeed could not load it.
    """
    found = complete_checkpoints(directory)
    if not found:
        return Progress()
    world_size = json.loads((found[-1] / MARKER).read_text())["world_size"]
    if world_size != ranks.world_size:
        raise ValueError(
            f"{found[-1]}: the optimizer's parts must be loaded by as many ranks as wrote them, {world_size}, but this run has "
            f"{ranks.world_size}; use torchrun --nproc-per-node {world_size}, or set train.resume=never in a new run_dir"
        )
    path, client_state = engine.load_checkpoint(directory, tag=found[-1].name)
    if path is None:
        raise RuntimeError(
            f"{found[-1]}: the checkpoint must load, but DeepSpeed refused it; remove the folder to go on from an older one"
        )
    torch.set_rng_state(client_state["rng"])
    return Progress(client_state["step"], client_state["best_acceptance_length"])
