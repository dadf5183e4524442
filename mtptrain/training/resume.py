"""Defines which settings and data a run must share with the checkpoint that it resumes from."""

from dataclasses import asdict
from pathlib import Path

from mtptrain.config import PipelineConfig, Resume
from mtptrain.data.draft_vocab import d2t_sha256
from mtptrain.heads.base import Head
from mtptrain.hidden_states.store import HiddenStates
from mtptrain.training.checkpoint import finished_checkpoints
from mtptrain.training.step_packing import PACKING_VERSION
from mtptrain.utils.errors import UserError

OPTIMISATION_SETTINGS = (
    "lr",
    "min_lr_ratio",
    "warmup_steps",
    "batch_tokens",
    "micro_batches_per_step",
    "weight_decay",
    "betas",
    "max_grad_norm",
    "ttt_loss_decay",
    "loss",
    "lk_eta",
    "feature_weight",
)
"""Settings of `train` that must not change when a run resumes."""


def check_resume(config: PipelineConfig, checkpoint_dir: Path) -> None:
    """Raises UserError if `train.resume=never` would overwrite checkpoints."""
    checkpoints = finished_checkpoints(checkpoint_dir)
    if config.train.resume is Resume.never and checkpoints:
        raise UserError(
            f"train.resume: must be auto if a checkpoint exists, but is never and {checkpoints[-1]} exists; set "
            "train.resume=auto to continue from it, or choose another run_dir"
        )


def resume_facts(config: PipelineConfig, states: HiddenStates, head: Head) -> dict[str, object]:
    """Returns the facts that must not change when a run resumes: its head, optimisation and order of the data."""
    return {
        "head": asdict(config.head),
        "the sha256 of the draft vocabulary": d2t_sha256(head.d2t),
        "seed": config.seed,
        **{f"train.{name}": getattr(config.train, name) for name in OPTIMISATION_SETTINGS},
        "the version of the packing of documents": PACKING_VERSION,
        **states.facts(),
    }
