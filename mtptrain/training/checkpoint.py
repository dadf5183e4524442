"""Checkpoints of a training run: head, optimizer, RNG and step. The step determines the learning rate and next batch.

`checkpoints/step_00000100/state.safetensors` holds each weight and its two Adam moments as unpartitioned fp32 tensors,
for any number of ranks and any ZeRO stage. `complete.json` has the size and sha256 of the state. Rank 0 writes both
under temporary names, and renames the state and then `complete.json`. A folder that a killed save left is passed over,
with a warning. A checkpoint that has lost a file, or whose state does not match `complete.json`, is torn, and the run
resumes from the newest whole one. The best head is kept in `best/`, whichever checkpoints are removed.
A run resumes only if its head, its data and how it optimises are those of the checkpoint (`resume_facts`).
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from mtptrain.config import TrainConfig
from mtptrain.data.draft_vocab import d2t_sha256
from mtptrain.data.identity import refuse_different_facts
from mtptrain.heads.base import Head
from mtptrain.heads.files import STEP_NAME, with_defaults
from mtptrain.hidden_states.store import HiddenStates
from mtptrain.settings.heads import HeadConfig
from mtptrain.training.deepspeed_engine import STATE_SUFFIXES, gather_state, restore_state
from mtptrain.training.step_packing import PACKING_VERSION
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_sealed, refuse_absent, remove_files, save_described, sync

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MARKER = "complete.json"
STATE = "state.safetensors"
NUM_STEPS = "num_steps"
"""Entry of the marker with the length of the run's schedule, which may differ when it resumes."""
OLDER = "remove the folder to resume from an older checkpoint"
TORN = "torn_"
"""Prefix added to the folder name of a torn checkpoint."""
RUN = ("run.rng", "run.step", "run.best_acceptance_length")
"""Names of the tensors in the state that belong to the run as a whole, not to a weight."""
OPTIMISATION_SETTINGS = (
    "optimizer",
    "lr",
    "min_lr_ratio",
    "warmup_steps",
    "warmup_share",
    "batch_tokens",
    "micro_batches_per_step",
    "weight_decay",
    "betas",
    "max_grad_norm",
    "ttt_loss_decay",
    "loss",
    "feature_weight",
)
"""Settings of `train` that must not change when a run resumes."""


@dataclass(frozen=True)
class Progress:
    step: int = 0
    best_acceptance_length: float = 0.0


def finished_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints whose save has finished, oldest first, also those that were damaged since."""
    return [folder for folder in _folders(directory) if not _is_unfinished(folder)]


def _is_unfinished(folder: Path) -> bool:
    """Returns whether a folder is what a killed save leaves: no state yet, or a marker that has not been renamed."""
    has_marker, has_state, is_temporary = ((folder / name).is_file() for name in (MARKER, STATE, f"{MARKER}.tmp"))
    return not has_marker and (not has_state or is_temporary)


def _folders(directory: Path, prefix: str = "") -> list[Path]:
    """Returns the folders with the name of a checkpoint after `prefix`, oldest first, whatever is in them."""
    folders = directory.glob(f"{prefix}step_*/")
    return sorted((folder for folder in folders if re.fullmatch(prefix + STEP_NAME, folder.name)), key=step_of)


def step_of(folder: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(folder.name.rpartition("_")[2])


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first: a kill in between must not leave one that looks complete."""
    remove_files(folder, (MARKER, STATE))


def describe_newest(directory: Path) -> str:
    """Returns where the same command would resume, for the line that ends an interrupted run."""
    checkpoints = finished_checkpoints(directory)
    if not checkpoints:
        return (
            f"no checkpoint was saved in {directory} yet, so the same command starts over; train.save_every sets how "
            "often to save one"
        )
    newest = checkpoints[-1]
    return f"the newest checkpoint, of step {step_of(newest)}, is kept in {newest}; the same command continues from it"


def save_checkpoint(
    engine: "DeepSpeedEngine", directory: Path, progress: Progress, facts: dict[str, object], keep: int, ranks: Ranks
) -> None:
    """Gather the state of all ranks, write it on rank 0, then remove all checkpoints but the newest `keep`."""
    folder = directory / f"step_{progress.step:08d}"
    state = gather_state(engine, keep_here=ranks.is_first)
    if ranks.is_first:
        unfinished = filter(_is_unfinished, _folders(directory))
        for unusable in [*unfinished, *_folders(directory, TORN)]:
            _remove(unusable)
        folder.mkdir(parents=True, exist_ok=True)
        run = (
            torch.get_rng_state(),
            torch.tensor(progress.step),
            torch.tensor(progress.best_acceptance_length, dtype=torch.float64),
        )
        tensors = state | dict(zip(RUN, run, strict=True))
        save_described(folder / STATE, tensors, folder / MARKER, facts | {"step": progress.step})
        sync(directory)  # the new folder must be on the disk before an old one is removed
        for old in finished_checkpoints(directory)[:-keep]:
            _remove(old)
    ranks.barrier()


def newest_whole_checkpoint(directory: Path, ranks: Ranks) -> Path | None:
    """Returns the newest whole checkpoint, the same on all ranks, or None if there is no checkpoint.

    Rank 0 verifies the checkpoints, newest first, until one is whole. It warns about each torn one, and renames it so
    that it is ignored. That every checkpoint is torn is refused.
    """
    newest: tuple[Path | None, dict[Path, str]] = _newest_whole(directory) if ranks.is_first else (None, {})
    chosen, faults = ranks.gather(newest)[0]
    if faults and chosen is None:
        raise UserError(
            f"{directory}: at least one checkpoint must be whole, but none is ({'; '.join(faults.values())}); restore "
            "one, or remove the folder to start again from step 0"
        )
    if ranks.is_first:
        for folder in _folders(directory):
            if _is_unfinished(folder) and (chosen is None or step_of(folder) > step_of(chosen)):
                print(
                    f"WARNING {folder}: must have {MARKER}, but has none, as after a kill while it was written; "
                    f"training resumes from {chosen or 'step 0'}",
                    flush=True,
                )
        for folder, fault in faults.items():
            print(f"WARNING {fault}; training resumes from {chosen}", flush=True)
            _remove(folder.with_name(TORN + folder.name))
            folder.rename(folder.with_name(TORN + folder.name))
    return chosen


def _newest_whole(directory: Path) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest whole checkpoint, and the fault of each newer one."""
    faults: dict[Path, str] = {}
    for folder in reversed(finished_checkpoints(directory)):
        fault = find_fault(folder)
        if fault is None:
            return folder, faults
        faults[folder] = fault
    return None, faults


def find_fault(folder: Path) -> str | None:
    """Returns what is wrong with the files of a checkpoint, or None if nothing is. Reads every byte."""
    try:
        refuse_absent(folder / MARKER, "the checkpoint is torn")
        marker = read_sealed(folder / MARKER, "the checkpoint is torn", ["step"], [STATE])
    except UserError as error:
        return str(error)
    step = marker["step"]
    return None if step == step_of(folder) else f"{folder}: must be step_{step:08d}, but was renamed"


def resume_facts(
    head_config: HeadConfig, settings: TrainConfig, seed: int, states: HiddenStates, head: Head
) -> dict[str, object]:
    """Returns the facts that must not change when a run resumes: its head, optimisation and order of the data."""
    return {
        "head": asdict(head_config),
        "the sha256 of the draft vocabulary": d2t_sha256(head.d2t),
        "seed": seed,
        **{f"train.{name}": getattr(settings, name) for name in OPTIMISATION_SETTINGS},
        "the version of the packing of documents": PACKING_VERSION,
        **states.facts(),
    }


def check_checkpoint(folder: Path, facts: dict[str, object]) -> None:
    """Refuse to resume from a checkpoint with a different head, data or optimisation, and name every difference."""
    stored = read_sealed(folder / MARKER, OLDER)
    if "head" in stored:
        stored["head"] = with_defaults(stored["head"])
    defaults = {f"train.{name}": getattr(TrainConfig(), name) for name in OPTIMISATION_SETTINGS}
    present, stored = json.loads(json.dumps([facts, {**defaults, **stored}]))  # an earlier version had fewer settings
    remedy = "restore these settings to resume from this checkpoint, or start again in another run_dir"
    refuse_different_facts(folder, {name: stored.get(name) for name in present}, present, remedy)


def load_checkpoint(engine: "DeepSpeedEngine", folder: Path) -> Progress:
    """Load a checkpoint, which may have been written by a different number of ranks."""
    path = folder / STATE
    with safe_open(path, framework="pt") as file:
        names = {name + suffix for name, _ in engine.module.named_parameters() for suffix in STATE_SUFFIXES}
        if different := sorted(set(file.keys()) ^ (names | set(RUN)))[:5]:
            raise UserError(
                f"{path}: must hold the weights and moments of this head, but differs in {different}; "
                f"remove {folder} to resume from an older checkpoint, or from step 0 if there is none"
            )
        rng, step, best = (file.get_tensor(name) for name in RUN)
        torch.set_rng_state(rng)
        restore_state(engine, file.get_tensor, int(step))
    return Progress(int(step), float(best))
