"""The training step: a head in a DeepSpeed engine, with the frozen parts of the target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mtptrain.config import TrainConfig
from mtptrain.heads.base import Head
from mtptrain.settings.precision import train_dtype
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.deepspeed_engine import GradientClipper, build_engine, is_partitioned
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings, LossSums
from mtptrain.training.optimizer import build_optimizer
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import set_compilation
from mtptrain.utils.cpu import keep_freed_memory
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.figures import shares

LEAST_WARMUP_STEPS = 10
"""A smaller share of a run is not warm-up enough, unless it is half of the run."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, summed over ranks and kept on the device. Reading them waits for the device."""

    sums: torch.Tensor
    """f32[4 + P, T]: `losses`, `kl`, `top1_accuracy`, `overlap` and the P `parts` of `LossSums`."""
    num_drafts: torch.Tensor  # f32[T]


COMPILED_STEPS = 100
"""Steps from which on `train.compile=null` compiles on a CPU, where compiling takes as long as some 30 steps."""


class Trainer:
    """A DeepSpeed engine and everything else that a step needs."""

    def __init__(
        self,
        head: Head,
        parts: FrozenParts,
        config: TrainConfig,
        deepspeed_config: dict[str, Any],
        num_steps: int,
        ranks: Ranks,
    ) -> None:
        if ranks.device.type == "cpu":
            keep_freed_memory()
        self.ranks = ranks
        self.config = config
        self.num_steps = num_steps
        self.dtype = getattr(torch, train_dtype(deepspeed_config))
        self.parts = parts.to(ranks.device, self.dtype)
        self.loss_settings = LossSettings.of(config)
        self.clock = PhaseClock(ranks.device)
        # For each step since the last check: its document ids, and this rank's summed metrics and the gradient norm.
        self._unchecked: list[tuple[tuple[int, ...], torch.Tensor]] = []
        head.activation_checkpointing = config.activation_checkpointing
        set_compilation(is_compiled(config.compile, ranks.device, num_steps))
        optimizer = build_optimizer(head, config, ranks, self.dtype)
        self.clipper = GradientClipper(optimizer, config.max_grad_norm, is_partitioned(deepspeed_config), ranks)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(config, step, num_steps))
        num_accumulated = config.micro_batches_per_step // ranks.world_size
        self.engine = build_engine(head, optimizer, schedule, deepspeed_config, num_accumulated, ranks)

    def step(self, batches: Sequence[Batch]) -> StepMetrics:
        """Make one optimizer step with this rank's batches."""
        # 1. Count the drafts over all ranks and batches: the losses are divided by these totals.
        num_drafts = (  # f32[T]
            torch.stack([batch.num_drafts for batch in batches]).sum(0).to(self.ranks.device, non_blocking=True)
        )
        self.ranks.sum(num_drafts)
        scale = self._scale(num_drafts)
        # 2. Accumulate the gradients of all batches. After the last batch, the engine sums them over ranks
        # and updates the weights.
        sums = num_drafts.new_zeros(4 + len(self.loss_settings.mix), len(num_drafts))
        for batch in batches:
            losses = self._losses(batch, scale)
            with self.clock.phase("backward"):
                self.engine.backward(losses.loss, scale_wrt_gas=False)
            with self.clock.phase("optimizer"):
                self.engine.step()
            sums += torch.stack([losses.losses, losses.kl, losses.top1_accuracy, losses.overlap, *losses.parts])
        # 3. Keep what `check_finite` checks later: reading a value here would wait for the device.
        self._unchecked.append((_document_ids(batches), torch.stack([sums.sum(), self.clipper.norm])))
        # 4. Sum the metrics over ranks.
        return StepMetrics(self.ranks.sum(sums), num_drafts)

    def _scale(self, num_drafts: torch.Tensor) -> torch.Tensor:
        """Returns the factor [T] that multiplies each depth's sum of losses."""
        weights = self.config.ttt_loss_decay ** torch.arange(
            len(num_drafts), dtype=torch.float32, device=num_drafts.device
        )
        return weights / weights.sum() / num_drafts.clamp(min=1)

    def _losses(self, batch: Batch, scale: torch.Tensor) -> LossSums:
        on_device = batch.to(self.ranks.device, self.dtype)
        return training_losses(self.engine, self.parts, on_device, scale, self.loss_settings, self.clock)

    def check_finite(self, step: int) -> None:
        """Refuse losses and gradient norms since the last check that are not finite. Waits for the device."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        is_finite = torch.stack([value for _, value in unchecked]).isfinite().tolist()
        first_step = step - len(unchecked) + 1
        # The norm is that of all ranks, so a rank whose own losses are not finite comes before one whose losses are.
        bad = [
            (first_step + i, has_finite_losses, self.ranks.rank, ids)
            for i, ((ids, _), (has_finite_losses, has_finite_norm)) in enumerate(zip(unchecked, is_finite, strict=True))
            if not (has_finite_losses and has_finite_norm)
        ]
        self._refuse(bad, "the loss and its gradient")

    @torch.no_grad()
    def check_weights(self, step: int, batches: Sequence[Batch]) -> None:
        """Refuse updated weights with which the loss of the last batches is not finite, before they are saved."""
        self.check_finite(step)
        ones = torch.ones(len(batches[0].num_drafts), device=self.ranks.device)
        is_finite = bool(torch.stack([self._losses(batch, ones).loss for batch in batches]).isfinite().all())
        bad = [] if is_finite else [(step, False, self.ranks.rank, _document_ids(batches))]
        self._refuse(bad, "the loss of the new weights")

    def _refuse(self, bad: list[tuple[int, bool, int, tuple[int, ...]]], what: str) -> None:
        """Raise on all ranks if any rank has bad steps, each given as (step, has finite losses, rank, document ids)."""
        bad_of_all = sorted(chain.from_iterable(self.ranks.gather(bad)))
        if bad_of_all:
            step, _, rank, document_ids = bad_of_all[0]
            raise UserError(
                f"train: {what} must be finite, but a value at step {step} is not, with documents "
                f"{list(document_ids)} on rank {rank}; lower train.lr (if the run has checkpoints, first delete the "
                "folder train in run_dir, because they fix the settings), or look at these documents; saved "
                "checkpoints are unchanged"
            )

    def describe(self, metrics: StepMetrics, step: int) -> dict[str, Any]:
        """Returns the record of step `step` (from 1) for `metrics.jsonl`."""
        self.check_finite(step)
        num_drafts = metrics.num_drafts.tolist()
        losses, kl, top1_accuracy, overlap, *parts = (shares(sums, num_drafts) for sums in metrics.sums.tolist())
        mix = self.loss_settings.mix
        weights = [self.config.ttt_loss_decay**depth for depth in range(len(losses))]
        return {
            "loss": sum(weight * (loss or 0.0) for weight, loss in zip(weights, losses, strict=True)) / sum(weights),
            "kl_at": kl,
            "top1_accuracy_at": top1_accuracy,
            "overlap_at": overlap,
            **{f"{part}_at": values for part, values in zip(mix, parts, strict=True) if len(mix) > 1},
            "lr": learning_rate(self.config, step - 1, self.num_steps),
            "grad_norm": float(self.clipper.norm),
        }


def is_compiled(setting: bool | None, device: torch.device, num_steps: int) -> bool:
    """Returns whether to compile `fused` functions: by default on GPUs, where memory bandwidth limits them, and in runs
    of a CPU that are long enough to win back the time."""
    return device.type == "cuda" or num_steps >= COMPILED_STEPS if setting is None else setting


def _document_ids(batches: Sequence[Batch]) -> tuple[int, ...]:
    return tuple(document_id for batch in batches for document_id in batch.document_ids)


def learning_rate(settings: TrainConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate at `step` (from 0) of a run of so many steps."""
    return settings.lr * rate_share(settings, step, num_steps)


def rate_share(settings: TrainConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate at `step` (from 0) of a run of so many steps as a share of its peak, which it reaches
    after the warm-up, and from which it falls to `train.min_lr_ratio`."""
    warmup_steps, least = warmup_of(settings, num_steps), settings.min_lr_ratio
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2


def warmup_of(settings: TrainConfig, num_steps: int) -> int:
    """Returns the number of steps of a run over which the learning rate rises."""
    least = min(LEAST_WARMUP_STEPS, num_steps // 2)
    return min(settings.warmup_steps, max(least, round(settings.warmup_share * num_steps)))


def check_batch_ranks(micro_batches_per_step: int, world_size: int) -> None:
    """Raises UserError if the micro-batches of a step cannot be divided evenly among the ranks."""
    if micro_batches_per_step % world_size:
        raise UserError(
            f"train.micro_batches_per_step: must be a multiple of the number of ranks, {world_size}, but is "
            f"{micro_batches_per_step}; set it to {-(-micro_batches_per_step // world_size) * world_size}, or change "
            "the number of ranks (torchrun's --nproc-per-node; NPROC_train and NODES under Slurm; CUDA_VISIBLE_DEVICES "
            "for mtptrain run)"
        )
