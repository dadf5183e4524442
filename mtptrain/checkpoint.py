"""Checkpoints of a training run: head, optimizer, schedule, RNG and the step, which is the position in the data.

DeepSpeed writes the files of `checkpoints/step_00000100/`, each rank its part; `complete.json` is written last, by rank 0, and a
checkpoint without it does not count. The best head by acceptance lies in `best/` and is never rotated away.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtptrain.distributed import Ranks
from mtptrain.run_dir import write_json

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MARKER = "complete.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    best_acceptance_length: float = 0.0


def complete_checkpoints(directory: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(marker.parent for marker in directory.glob(f"step_*/{MARKER}"))


def save_checkpoint(
    engine: "DeepSpeedEngine", directory: Path, progress: Progress, facts: dict[str, object], keep: int, ranks: Ranks
) -> None:
    """Write a checkpoint on all ranks, then remove all but the newest `keep`.

    Args:
        facts: settings by name that must be the same for the run to go on from it.
    """
    tag = f"step_{progress.step:08d}"
    client_state = {"step": progress.step, "best_acceptance_length": progress.best_acceptance_length, "rng": torch.get_rng_state()}
    engine.save_checkpoint(directory, tag=tag, client_state=client_state, save_latest=False)
    ranks.barrier()
    if ranks.is_first:
        write_json(directory / tag / MARKER, facts)
        for old in complete_checkpoints(directory)[:-keep]:
            (old / MARKER).unlink()  # first, so that a kill in between leaves no half checkpoint that counts
            shutil.rmtree(old)
    ranks.barrier()


def check_checkpoint(directory: Path, facts: dict[str, object]) -> None:
    """Refuse to go on from a checkpoint whose step, data or optimizer parts mean something else now.

    Raises:
        ValueError: naming each setting that differs.
    """
    found = complete_checkpoints(directory)
    if not found:
        return
    stored = json.loads((found[-1] / MARKER).read_text())
    present = json.loads(json.dumps(facts))
    different = [
        f"{name} must be {stored.get(name)}, but is {value}" for name, value in present.items() if stored.get(name) != value
    ]
    if different:
        raise ValueError(
            f"{found[-1]}: to go on from this checkpoint, {'; '.join(different)}; set it as it was, or start anew in another run_dir"
        )


def load_checkpoint(engine: "DeepSpeedEngine", directory: Path) -> Progress:
    """Go on from the newest complete checkpoint; a run without one starts at step 0.

    Raises:
        RuntimeError: DeepSpeed could not load it.
    """
    found = complete_checkpoints(directory)
    if not found:
        return Progress()
    path, client_state = engine.load_checkpoint(directory, tag=found[-1].name)
    if path is None:
        raise RuntimeError(
            f"{found[-1]}: the checkpoint must load, but DeepSpeed refused it; remove the folder to go on from an older one"
        )
    torch.set_rng_state(client_state["rng"])
    return Progress(client_state["step"], client_state["best_acceptance_length"])
