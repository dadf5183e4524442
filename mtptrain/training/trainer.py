"""The training step: a head in a DeepSpeed engine, the frozen parts of the target beside it."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__

from mtptrain.config import TrainConfig
from mtptrain.heads.base import Head
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.losses import LossSettings, LossSums, draft_losses
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import fuse
from mtptrain.utils.cpu import keep_freed_memory
from mtptrain.utils.distributed import Ranks, prepare_single_process


@dataclass(frozen=True)
class StepMetrics:
    """Sums over ranks of one step, on the device: reading them waits for it."""

    losses: torch.Tensor  # f32[T]
    kl: torch.Tensor  # f32[T]
    top1_accuracy: torch.Tensor  # f32[T]
    overlap: torch.Tensor  # f32[T]
    num_drafts: torch.Tensor  # f32[T]

    def by_depth(self, name: str) -> list[float]:
        total: torch.Tensor = getattr(self, name)
        return (total / self.num_drafts.clamp(min=1)).tolist()


class Trainer:
    """One DeepSpeed engine and what it needs for a step."""

    def __init__(
        self,
        head: Head,
        parts: FrozenParts,
        config: TrainConfig,
        deepspeed_config: dict[str, Any],
        num_steps: int,
        ranks: Ranks,
    ) -> None:
        check_batch_ranks(config.micro_batches_per_step, ranks.world_size)
        prepare_single_process()
        if ranks.device.type == "cpu":
            keep_freed_memory()
        # Shared-memory collectives would be compiled on first use; gloo's serve a small head as well, without compiler or ninja.
        __compatible_ops__["deepspeed_shm_comm"] = False
        self.ranks = ranks
        self.config = config
        self.num_steps = num_steps
        self.dtype = torch.bfloat16 if deepspeed_config.get("bf16", {}).get("enabled") else torch.float32
        self.parts = parts.to(ranks.device, self.dtype)
        self.loss_settings = LossSettings(config.loss, config.lk_eta, config.feature_weight, config.loss_chunk_rows)
        self.clock = PhaseClock(ranks.device)
        self._unread: list[tuple[tuple[int, ...], torch.Tensor]] = []  # documents and figures of steps not yet checked
        head.activation_checkpointing = config.activation_checkpointing
        fuse(is_compiled(config.compile, ranks.device))
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay, fused=True
        )
        optimizer.register_step_pre_hook(self._clip)
        self.grad_norm = torch.zeros((), device=ranks.device)
        zero = deepspeed_config.get("zero_optimization", {})
        self._is_partitioned = zero.get("stage", 0) > 0
        # DeepSpeed's bucket of gradients takes a gigabyte, however small the head is, which then fits into it whole.
        sizes = [parameter.numel() for parameter in head.parameters()]
        bucket = max(sum(sizes) // 8, *sizes)
        sharing = {"reduce_bucket_size": bucket, **zero, "compute_grad_norm": False} if self._is_partitioned else zero
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, config.warmup_steps, num_steps, config.min_lr_ratio)
        )
        self.engine, *_ = deepspeed.initialize(
            model=head,
            optimizer=optimizer,
            lr_scheduler=schedule,
            dist_init_required=True if ranks.world_size == 1 else None,
            config={
                **with_fp32_sums(deepspeed_config, config.micro_batches_per_step // ranks.world_size, ranks.is_first),
                # A step is never left out in silence: `check_finite` stops the run.
                **({"bf16": {**deepspeed_config["bf16"], "check_grad_overflow": False}} if "bf16" in deepspeed_config else {}),
                "zero_optimization": sharing,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": config.micro_batches_per_step // ranks.world_size,
                "gradient_allreduce_op": "sum",  # gradients of the ranks are parts of one sum
                "gradient_clipping": 0.0,
                "steps_per_print": 2**31,
                "zero_allow_untested_optimizer": True,
            },
        )

    def _clip(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Clip what the optimizer is about to read: all gradients, or with ZeRO this rank's part of them in fp32.

        DeepSpeed's own norm copies every gradient into fp64, and without ZeRO and bf16 it forgets the norm.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self.grad_norm = self.ranks.sum(norm.square()).sqrt() if self._is_partitioned else norm
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, self.grad_norm)

    def step(self, batches: Sequence[Batch]) -> StepMetrics:
        """One optimizer step over this rank's batches: the loss is divided once, by the drafts of all ranks and batches."""
        num_drafts = torch.stack([batch.num_drafts for batch in batches]).sum(0).to(self.ranks.device, non_blocking=True)  # f32[T]
        self.ranks.sum(num_drafts)
        scale = self._scale(num_drafts)
        sums = num_drafts.new_zeros(4, len(num_drafts))
        for batch in batches:
            losses = self._losses(batch.to(self.ranks.device, self.dtype), scale)
            with self.clock.phase("backward"):
                self.engine.backward(losses.loss, scale_wrt_gas=False)
            with self.clock.phase("optimizer"):
                self.engine.step()
            sums += torch.stack([losses.losses, losses.kl, losses.top1_accuracy, losses.overlap])
        self._unread.append((_document_ids(batches), sums.sum() + self.grad_norm))
        losses_at, kl, top1_accuracy, overlap = self.ranks.sum(sums)
        return StepMetrics(losses_at, kl, top1_accuracy, overlap, num_drafts)

    def _scale(self, num_drafts: torch.Tensor) -> torch.Tensor:
        """What a depth's sum of losses [T] is multiplied with."""
        weights = self.config.ttt_loss_decay ** torch.arange(len(num_drafts), dtype=torch.float32, device=num_drafts.device)
        return weights / weights.sum() / num_drafts.clamp(min=1)

    def _losses(self, batch: Batch, scale: torch.Tensor) -> LossSums:
        head: Head = self.engine.module
        with self.clock.phase("forward"):
            taught, read_states = batch.packing.rows + 1, batch.aux_hidden_states  # [M], [N, L, H]
            if read_states is None:
                read_states = self.parts.final_norm(batch.hidden_states)  # [N, H]
                target_states = read_states[taught]  # [M, H]
            else:
                target_states = self.parts.final_norm(batch.hidden_states[taught])
            embeddings = self.parts.embed(batch.next_ids)  # [N, H]
            states = self.engine(read_states, embeddings, batch.packing, len(batch.is_draft))  # [T, M, H]
        with self.clock.phase("loss"):
            return draft_losses(
                states,
                self.parts.lm_head if head.lm_head is None else head.lm_head.weight,
                target_states,
                self.parts.logits,
                batch.is_draft,
                scale,
                self.loss_settings,
                head.draft_token_ids,
            )

    def check_finite(self, step: int) -> None:
        """Losses and gradient norms of all steps since the last time: asked together, for the answer waits for the device.

        Raises:
            RuntimeError: one of them is not finite.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return
        is_finite = torch.stack([figure for _, figure in unread]).isfinite().tolist()
        first_step = step - len(unread) + 1
        bad = [(first_step + i, self.ranks.rank, ids) for i, (ids, _) in enumerate(unread) if not is_finite[i]]
        self._refuse(bad, "the loss and its gradient")

    @torch.no_grad()
    def check_weights(self, step: int, batches: Sequence[Batch]) -> None:
        """The loss of the last batches with the weights that the step has left, before anything of them is kept.

        Raises:
            RuntimeError: it is not finite.
        """
        self.check_finite(step)
        ones = torch.ones(len(batches[0].num_drafts), device=self.ranks.device)
        losses = [self._losses(batch.to(self.ranks.device, self.dtype), ones).loss for batch in batches]
        is_finite = bool(torch.stack(losses).isfinite().all())
        self._refuse([] if is_finite else [(step, self.ranks.rank, _document_ids(batches))], "the loss of the new weights")

    def _refuse(self, bad: list[tuple[int, int, tuple[int, ...]]], what: str) -> None:
        """On all ranks, what any of them found: step, rank and documents."""
        of_all = sorted(chain.from_iterable(self.ranks.gather(bad)))
        if of_all:
            step, rank, document_ids = of_all[0]
            raise RuntimeError(
                f"train: {what} must be finite, but is not at step {step}, with documents {list(document_ids)} on rank {rank}; "
                "lower train.lr, or look at these documents; the last checkpoint is as it was"
            )

    def describe(self, metrics: StepMetrics, step: int) -> dict[str, Any]:
        """The record of step `step` (from 1) for `metrics.jsonl`.

        Raises:
            RuntimeError: the loss of this step, or of one since the last record, is not finite.
        """
        self.check_finite(step)
        losses = metrics.by_depth("losses")
        weights = [self.config.ttt_loss_decay**depth for depth in range(len(losses))]
        return {
            "loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights),
            "kl_at": metrics.by_depth("kl"),
            "top1_accuracy_at": metrics.by_depth("top1_accuracy"),
            "overlap_at": metrics.by_depth("overlap"),
            "lr": self.config.lr * warmup_cosine(step - 1, self.config.warmup_steps, self.num_steps, self.config.min_lr_ratio),
            "grad_norm": float(self.grad_norm),
        }


def is_compiled(setting: bool | None, device: torch.device) -> bool:
    """Returns whether `fused` functions are compiled, given `train.compile`: a GPU's step is bound by memory traffic without."""
    return device.type == "cuda" if setting is None else setting


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm f32[] of all values together, exact to fp32: of 10^8 values in one piece a CPU's sum of squares loses two percent."""
    return torch.nn.utils.get_total_norm([piece for tensor in tensors for piece in tensor.flatten().split(2**17)])


def _document_ids(batches: Sequence[Batch]) -> tuple[int, ...]:
    return tuple(document_id for batch in batches for document_id in batch.document_ids)


def warmup_cosine(step: int, warmup_steps: int, num_steps: int, min_ratio: float) -> float:
    """Learning rate of step `step` (from 0) over its peak: linear up, then half a cosine down to `min_ratio`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2


def with_fp32_sums(config: dict[str, Any], num_added: int, warn: bool = True) -> dict[str, Any]:
    """Returns DeepSpeed's config such that a rank adds the gradients of its micro-batches in fp32, which it does with ZeRO 2.

    Args:
        config: of DeepSpeed.
        num_added: micro-batches of a rank in a step.
        warn: where bf16 with ZeRO 1 adds them in bf16: DeepSpeed's fp32 sums there leave the trainer no gradient to clip.
    """
    if num_added == 1 or not config.get("bf16", {}).get("enabled"):
        return config
    if config["zero_optimization"]["stage"] == 2:
        return {**config, "data_types": {"grad_accum_dtype": "fp32", **config.get("data_types", {})}}
    if warn:
        warnings.warn(
            f"deepspeed.zero_optimization.stage: the gradients of the {num_added} micro-batches that each rank adds must be summed in "
            "fp32 to lose nothing, but ZeRO 1 sums them in bf16; set deepspeed=zero2, or start as many ranks as there are micro-batches",
            stacklevel=2,
        )
    return config


REFUSED_OF_ZERO = {
    "offload_optimizer": "the trainer takes the gradient's norm of what the optimizer reads, which DeepSpeed does not allow there",
    "round_robin_gradients": "DeepSpeed then gives a checkpoint the weights of other parameters",
    "compute_grad_norm": "the trainer takes the gradient's norm itself",
}
FILLED_IN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "optimizer",
)


def check_deepspeed(config: dict[str, Any]) -> None:
    """Raises ValueError for what this trainer does not do, or sets itself."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2):
        raise ValueError(
            f"deepspeed.zero_optimization.stage: must be 0, 1 or 2, but is {stage}: a head is small enough for its weights to stay whole; "
            "set deepspeed=zero2"
        )
    if config.get("bf16", {}).get("enabled") and stage == 0:
        raise ValueError(
            "deepspeed.zero_optimization.stage: must be 1 or 2 with bf16, but is 0: DeepSpeed keeps fp32 masters there in a form of its "
            "own; set deepspeed=zero1"
        )
    if config.get("fp16", {}).get("enabled"):
        raise ValueError(
            "deepspeed.fp16.enabled: must be false, but is true: the loss is not scaled; set deepspeed.bf16.enabled=true"
        )
    for name, why in REFUSED_OF_ZERO.items():
        if zero.get(name):
            raise ValueError(f"deepspeed.zero_optimization.{name}: must not be set, but is {zero[name]}: {why}; remove it")
    if stage == 1 and config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise ValueError(
            "deepspeed.data_types.grad_accum_dtype: must be left out with ZeRO 1, but is fp32: DeepSpeed has it with ZeRO 2 alone where "
            "the trainer takes the gradient's norm; set deepspeed=zero2"
        )
    for name in FILLED_IN:
        if name in config:
            raise ValueError(
                f"deepspeed.{name}: must not be set, but is {config[name]}: the trainer sets it from train.*; remove it"
            )


def check_device(device: torch.device, config: dict[str, Any]) -> None:
    """Raises ValueError where the device has no attention kernel for the dtype."""
    if device.type == "cuda" and not config.get("bf16", {}).get("enabled"):
        raise ValueError(
            "deepspeed.bf16.enabled: must be true on a GPU, but is false: flash attention has no fp32; set deepspeed=zero1"
        )


def check_batch_ranks(micro_batches_per_step: int, world_size: int) -> None:
    """Raises ValueError where the micro-batches of a step cannot be shared out evenly."""
    if micro_batches_per_step % world_size:
        raise ValueError(
            f"train.micro_batches_per_step: must be a multiple of the number of ranks, {world_size}, but is {micro_batches_per_step}; "
            f"set it to {-(-micro_batches_per_step // world_size) * world_size} or change --nproc-per-node"
        )
