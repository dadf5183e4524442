"""Measures a head's acceptance and losses, during training and in `mtptrain choose-head`.

The head with the highest acceptance length is the best one. The prompts are the `choosing` part of the held-out data.
`mtptrain acceptance` drafts and verifies with the same code.
"""

from dataclasses import dataclass

import torch

from mtptrain.config import AcceptanceConfig, TrainConfig
from mtptrain.data.prompt_files import Documents
from mtptrain.decoding.acceptance import Acceptance, generate_in_batches, summarise
from mtptrain.decoding.confidence import Calibration, Confidences, fit
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.prompts import check_head_context, held_out_prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads.base import Head
from mtptrain.heads.corrected import Confident
from mtptrain.heads.files import build_head, fill_head
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import check_placement, load_target
from mtptrain.target.model import Target
from mtptrain.training.held_out import HeldOutLosses, held_out_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.distributed import Ranks


@dataclass(frozen=True)
class Validated:
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


def measured_with(settings: AcceptanceConfig, max_new_tokens: int) -> dict[str, object]:
    """Returns the settings on which the figures of a validation depend, as `choice.json` stores them."""
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "max_new_tokens": max_new_tokens,
        "prompt_tokens": settings.prompt_tokens,
        "dtype": str(settings.dtype),
    }


class Validation:
    """Measures greedy acceptance and losses with the full target. Each rank takes its share of the prompts."""

    def __init__(
        self,
        documents: Documents,
        num_prompts: int,
        head_config: HeadConfig,
        training: TrainConfig,
        settings: AcceptanceConfig,
        target: TargetFiles,
        ranks: Ranks,
    ) -> None:
        """Choose prompts from held-out documents; the target is loaded when it is first needed.

        A target without weights, or too large for the ranks' devices, is refused, and so are prompts that with their
        drafts exceed the target's or the head's context.
        """
        self.dtype = getattr(torch, settings.dtype)
        check_placement(target.directory, self.dtype, ranks.device)
        num_drafts, max_new_tokens = settings.num_speculative_tokens, training.validation_new_tokens
        lengths = settings.prompt_tokens, max(max_new_tokens, num_drafts), target.config.max_position_embeddings
        prompts = held_out_prompts(documents, num_prompts, *lengths)
        with torch.device("meta"):
            head = build_head(head_config, target.config)
        check_head_context(head, prompts.values(), max_new_tokens, num_drafts, setting="head")
        self.prompts, self.num_prompts = list(prompts.values())[ranks.rank :: ranks.world_size], len(prompts)
        self.head_config, self.training, self.settings = head_config, training, settings
        self.target, self.ranks = target, ranks
        self._loaded: Target | None = None

    def measure(self, head_state: dict[str, torch.Tensor], description: str | None = None) -> Validated:
        """Validates the head that has these weights, as `measure_head` does."""
        head = build_head(self.head_config, self.target.config)
        return self.measure_head(fill_head(head, head_state, self.dtype, self.ranks.device), description)

    def measure_head(self, head: Head, description: str | None = None) -> Validated:
        """Validates a head that is ready to draft, on the prompts of all ranks. A description labels a progress bar."""
        if self._loaded is None:
            self._loaded = load_target(self.target.directory, self.dtype, self.ranks.device)
        confidences = Confidences() if isinstance(head, Confident) else None
        generations = generate_in_batches(
            self._loaded,
            HeadDrafter(head, self._loaded.parts, self.settings.num_speculative_tokens),
            self.prompts,
            sampler=Sampler(),
            eos_token_ids=self._loaded.eos_token_ids,
            description=description,
            observe=confidences,
            **self.settings.limits | {"max_new_tokens": self.training.validation_new_tokens},
        )
        acceptance = summarise([generation for share in self.ranks.gather(generations) for generation in share])
        answered, of_loss = zip(self.prompts, generations, strict=True), LossSettings.of(self.training)
        losses = held_out_losses(head, self._loaded, answered, self.head_config.ttt_steps, of_loss, self.ranks)
        if confidences is None:
            return Validated(acceptance, losses)
        return Validated(acceptance, losses, fit(torch.cat(self.ranks.gather(confidences.drafts()))))
