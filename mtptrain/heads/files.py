"""Stores heads: weights in `head.safetensors`, the config and the identity of the target in `head.json`."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.settings.heads import HeadConfig, config_of
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import StageMissing, UserError
from mtptrain.utils.files import read_sealed, remove_files, save_described

WEIGHTS = "head.safetensors"
TARGET_WEIGHTS = "target_weights_sha256"
RESTORE = "copy it again, or train again"
"""The advice of errors about a damaged head."""
STEP_NAME = r"step_(\d{8}|[1-9]\d{8,})"
"""Names of the folders of kept heads and of checkpoints."""
CHOICE = "choice.json"
"""File in `run_dir/train` with the measurements of `mtptrain choose-head`."""
SCALE, SHIFT = "confidence_scale", "confidence_shift"
"""Entries of `head.json` with the calibration of the head's confidence; see `mtptrain.decoding.confidence`."""


def build_head(config: HeadConfig, target_config: PreTrainedConfig) -> Head:
    """Build a new head for a target, with weights drawn from torch's global generator."""
    return HEADS[config.name](config, target_config)


def save_head(directory: Path, state: dict[str, torch.Tensor], config: HeadConfig, facts: dict[str, object]) -> None:
    """Write a head to a directory, as `save_described` does. A new directory that has a `head.json` is complete.

    Weights have their training dtype. Facts are more entries of `head.json`: `TARGET_WEIGHTS`, needed by
    `check_head_target`, `SCALE` and `SHIFT` of a calibrated head, and such as the step and the acceptance there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_described(directory / WEIGHTS, state, directory / "head.json", {"head": asdict(config), **facts})


def best_or_last(stage_dir: Path) -> Path:
    """Returns the directory of a run's best head in `run_dir/train`, or of its last one if none has been measured."""
    best, last = stage_dir / "best", stage_dir / "last"
    is_unmeasured = (last / "head.json").is_file() and not (best / "head.json").is_file()
    return last if is_unmeasured else best


def kept_head(stage_dir: Path, step: int) -> Path:
    """Returns the directory in `run_dir/train` of the head that is kept at this step, to be measured later."""
    return stage_dir / "heads" / f"step_{step:08d}"


def kept_heads(stage_dir: Path) -> dict[int, Path]:
    """Returns the directories of all complete kept heads by step, in rising order."""
    directories = (facts.parent for facts in stage_dir.glob("heads/step_*/head.json"))
    heads = {int(each.name.removeprefix("step_")): each for each in directories if re.fullmatch(STEP_NAME, each.name)}
    return dict(sorted(heads.items()))


def remove_stale_heads(stage_dir: Path, step: int) -> None:
    """Remove the heads that a run which resumes from `step` will keep again, and `choice.json` if it lists one of them.

    `best` stays until training measures a better head than all it has measured.
    """
    choice = stage_dir / CHOICE
    if choice.is_file() and any(
        head["step"] > step
        for head in read_sealed(choice, "delete it and run mtptrain choose-head again", ["heads"])["heads"]
    ):
        choice.unlink()
    for kept_step, directory in kept_heads(stage_dir).items():
        if kept_step > step:
            remove_files(directory, ("head.json", WEIGHTS))


def refuse_earlier_best(stage_dir: Path) -> None:
    """Raise UserError if a training that measures nothing would leave the best head of an earlier one in its place."""
    best = stage_dir / "best"
    if (best / "head.json").is_file():
        raise UserError(
            f"{best}: must not exist if training starts anew and measures no head, because acceptance and export would "
            "take this head of an earlier training, but does; move it away, or set another run_dir, "
            "train.validation_prompts or train.validate_every"
        )


def checked_weights(directory: Path) -> Path:
    """Returns the weights of a head that `save_head` wrote to a directory, if no file was changed or damaged since."""
    read_sealed(directory / "head.json", RESTORE, files=[WEIGHTS])
    return directory / WEIGHTS


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns stored settings of a head, with defaults for settings added since."""
    return {**asdict(HEADS[settings["name"]].Config()), **settings}


def check_head_target(directory: Path, target: TargetFiles) -> None:
    """Refuse a head that was trained for other weights than the target's."""
    stored, expected = _read_facts(directory, TARGET_WEIGHTS)[TARGET_WEIGHTS], target.weights_sha256
    if stored != expected:
        raise UserError(
            f"{directory / 'head.json'}: {TARGET_WEIGHTS} must be {expected}, that of {target.directory}, but is "
            f"{stored}: the head belongs to another target; set target.path to that target, or train again"
        )


def stored_calibration(directory: Path) -> tuple[float, float] | None:
    """Returns the scale and the shift of the confidence that validation found for a trained head; None without."""
    facts = read_sealed(directory / "head.json", RESTORE) if (directory / "head.json").is_file() else {}
    return (facts[SCALE], facts[SHIFT]) if SCALE in facts else None


def first_misfit(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[str, str, str] | None:
    """Returns the first name whose tensor is missing, unknown or of another shape, with both shapes in words."""
    for name in sorted(expected.keys() | found.keys()):
        shapes = [f"of shape {tuple(each[name].shape)}" if name in each else "absent" for each in (expected, found)]
        if shapes[0] != shapes[1]:
            return name, shapes[0], shapes[1]
    return None


def fill_head(head: Head, state: dict[str, torch.Tensor], dtype: torch.dtype | None, device: torch.device) -> Head:
    """Load weights into a head and prepare it for inference, in the dtype of the weights if `dtype` is None."""
    stored_dtype = next(state[name].dtype for name, _ in head.named_parameters())  # buffers may have another
    head.to(stored_dtype).load_state_dict(state)
    return head.to(device, dtype).eval().requires_grad_(False)


def stored_config(directory: Path) -> HeadConfig:
    """Returns the config of the head that `save_head` wrote to a directory, if this version knows all its settings."""
    settings = _read_facts(directory, "head")["head"]
    if not isinstance(settings, dict) or str(settings.get("name")) not in HEADS:
        raise UserError(
            f"{directory / 'head.json'}: head must be the settings of one of {', '.join(HEADS)}, but is {settings}; "
            f"{RESTORE}"
        )
    return config_of(HEADS[settings["name"]].Config, settings, directory / "head.json")


def _read_facts(directory: Path, required: str) -> dict[str, Any]:
    """Read the `head.json` that `save_head` wrote, which must have the entry `required`."""
    if not (directory / "head.json").is_file():
        raise StageMissing(f"{directory}: must hold a trained head, but has no head.json; run mtptrain train first")
    return read_sealed(directory / "head.json", RESTORE, [required])
