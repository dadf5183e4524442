"""Measures a head's acceptance and losses, during training and in `mtptrain choose-head`.

The head with the highest acceptance length is the best one. The prompts are the `choosing` part of the held-out data.
`mtptrain acceptance` drafts and verifies with the same code.
"""

from dataclasses import dataclass

import torch

from mtptrain.config import PipelineConfig
from mtptrain.decoding.acceptance import Acceptance, generate_in_batches, summarise
from mtptrain.decoding.confidence import Calibration, Confidences, fit
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.prompts import (
    HeldOut,
    check_head_context,
    check_num_drafts,
    held_out_documents,
    held_out_prompts,
)
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads.base import Head
from mtptrain.heads.corrected import Confident
from mtptrain.heads.files import build_head, fill_head
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import check_placement, load_target
from mtptrain.target.model import Target
from mtptrain.training.held_out import HeldOutLosses, held_out_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.distributed import Ranks


@dataclass(frozen=True)
class Validated:
    """The results of validating a head once."""

    acceptance: Acceptance
    held_out: HeldOutLosses | None
    """Losses over the target's answers to the same prompts; None for an fp32 target on a GPU."""
    calibration: Calibration | None = None
    """That of the head's confidence, fitted to the same drafts; None for a head without one."""

    def record(self) -> dict[str, object]:
        """Returns the figures for `metrics.jsonl`, `choice.json` and the `head.json` of measured heads."""
        losses = {} if self.held_out is None else {f"held_out_{name}": x for name, x in vars(self.held_out).items()}
        return {
            "acceptance_length": self.acceptance.acceptance_length,
            "acceptance_rate_at": self.acceptance.acceptance_rate_at,
            **losses,
            **({} if self.calibration is None else vars(self.calibration)),
        }


def measured_with(config: PipelineConfig) -> dict[str, object]:
    """Returns the settings on which the figures of a validation depend, as `choice.json` stores them."""
    return {
        "num_speculative_tokens": config.acceptance.num_speculative_tokens,
        "max_new_tokens": config.train.validation_new_tokens,
        "prompt_tokens": config.acceptance.prompt_tokens,
        "dtype": str(config.acceptance.dtype),
    }


class Validation:
    """Measures greedy acceptance and losses with the full target. Each rank takes its share of the prompts."""

    def __init__(self, config: PipelineConfig, num_prompts: int, target: TargetFiles, ranks: Ranks) -> None:
        """Choose the prompts; the target is loaded when it is first needed.

        Raises:
            UserError: stage 1 has not been run, or the target has no weights, or no prompt fits, a prompt and its
                drafts exceed the target's or the head's context, or the target does not fit the ranks' devices.
        """
        self.dtype = getattr(torch, config.acceptance.dtype)
        check_placement(target.directory, self.dtype, ranks.device)
        context_tokens = target.config.max_position_embeddings
        prompts = held_out_prompts(
            held_out_documents(config.stage_dir("prompts"), HeldOut.choosing),
            num_prompts,
            config.acceptance.prompt_tokens,
            config.train.validation_new_tokens,
            context_tokens,
        )
        check_num_drafts(prompts, config.acceptance.num_speculative_tokens, context_tokens)
        with torch.device("meta"):
            head = build_head(config.head, target.config)
        lengths = config.train.validation_new_tokens, config.acceptance.num_speculative_tokens
        check_head_context(head, prompts.values(), *lengths, setting="head")
        self.prompts = list(prompts.values())[ranks.rank :: ranks.world_size]
        self.config = config
        self.target = target
        self.ranks = ranks
        self._loaded: Target | None = None

    def measure(self, head_state: dict[str, torch.Tensor]) -> Validated:
        """Validates the head that has these weights, on the prompts of all ranks."""
        head = build_head(self.config.head, self.target.config)
        return self.measure_head(fill_head(head, head_state, self.dtype, self.ranks.device))

    def measure_head(self, head: Head, description: str | None = None) -> Validated:
        """Validates a head on the prompts of all ranks.

        Args:
            head: ready to draft, on the target's device.
            description: the label of the progress bar; None shows none.
        """
        if self._loaded is None:
            self._loaded = load_target(self.target.directory, self.dtype, self.ranks.device)
        num_speculative_tokens = self.config.acceptance.num_speculative_tokens
        confidences = Confidences() if isinstance(head, Confident) else None
        generations = generate_in_batches(
            self._loaded,
            HeadDrafter(head, self._loaded.parts, num_speculative_tokens),
            self.prompts,
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=self.config.train.validation_new_tokens,
            sampler=Sampler(),
            eos_token_ids=self._loaded.eos_token_ids,
            batch_size=self.config.acceptance.batch_size,
            batch_tokens=self.config.acceptance.batch_tokens,
            description=description,
            observe=confidences,
        )
        acceptance = summarise([generation for share in self.ranks.gather(generations) for generation in share])
        answered, settings = zip(self.prompts, generations, strict=True), LossSettings.of(self.config.train)
        depths = self.config.head.ttt_steps
        losses = held_out_losses(head, self._loaded, answered, depths, settings, self.ranks)
        if confidences is None:
            return Validated(acceptance, losses)
        return Validated(acceptance, losses, fit(torch.cat(self.ranks.gather(confidences.drafts()))))
