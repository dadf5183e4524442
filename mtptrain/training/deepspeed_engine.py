"""Everything that depends on DeepSpeed's internals: its settings, gradients and optimizer state."""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from typing import Any

import torch
import torch.distributed as dist

# DeepSpeed looks for its accelerator when it is imported, and would take one that is not here.
os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"

import deepspeed
from deepspeed import DeepSpeedEngine
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from packaging.requirements import Requirement

from mtptrain.heads.base import Head
from mtptrain.settings.precision import with_fp32_sums
from mtptrain.utils.distributed import Ranks, close_at_exit, prepare_single_process
from mtptrain.utils.errors import UserError, error_summary

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_SUFFIXES = ("", *(f".{moment}" for moment in MOMENTS))
"""Suffixes that a parameter's name gets for the weight itself and for its Adam moments."""

REFUSED_SETTINGS = {
    "fp16.enabled": "the loss is not scaled",
    "bf16.check_grad_overflow": "DeepSpeed would skip a step with an overflow, at which the trainer stops",
    "zero_optimization.offload_optimizer": "the trainer computes the gradient norm itself (compute_grad_norm=false), "
    "which DeepSpeed does not support with an offloaded optimizer",
    "zero_optimization.round_robin_gradients": "DeepSpeed may then return the fp32 weights of the wrong parameters, "
    "and checkpoints would store them",
    "zero_optimization.compute_grad_norm": "the trainer computes the gradient norm itself",
    **dict.fromkeys(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print"),
            *("gradient_allreduce_op", "gradient_clipping", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
        ),
        "the trainer sets it itself",
    ),
}
"""Settings that must not be set, by section and name, and why."""


def check_deepspeed(config: dict[str, Any]) -> None:
    """Raises UserError for a version or settings that the trainer does not support, or settings that it sets itself."""
    required = next(Requirement(each) for each in requires("mtptrain") or () if each.startswith("deepspeed"))
    if not required.specifier.contains(deepspeed.__version__, prereleases=True):
        raise UserError(
            f"deepspeed: must be of version {required.specifier}, but is {deepspeed.__version__}, of which settings "
            f"have other names or meanings; run pip install '{required}'"
        )
    for name in ("zero_optimization", "bf16", "fp16", "data_types"):
        if not isinstance(config.get(name, {}), dict):
            raise UserError(
                f"deepspeed.{name}: must be a section of settings, but is {config[name]!r}; remove it and set "
                "deepspeed=zero1"
            )
    for name, why in REFUSED_SETTINGS.items():
        *section, key = name.split(".")
        if value := (config.get(section[0], {}) if section else config).get(key):
            raise UserError(f"deepspeed.{name}: must not be set, but is {value}: {why}; remove it")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2):
        raise UserError(
            f"deepspeed.zero_optimization.stage: must be 0, 1 or 2, but is {stage}: a head is small enough for its "
            "weights to stay whole; set deepspeed=zero2"
        )
    if config.get("bf16", {}).get("enabled") and stage == 0:
        raise UserError(
            "deepspeed.zero_optimization.stage: must be 1 or 2 with bf16, but is 0: without ZeRO, DeepSpeed keeps its "
            "fp32 weights in a different form; set deepspeed=zero1"
        )
    if stage == 1 and config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise UserError(
            "deepspeed.data_types.grad_accum_dtype: must be left out with ZeRO 1, but is fp32: the trainer computes "
            "the gradient norm, and DeepSpeed then supports fp32 only with ZeRO 2; set deepspeed=zero2"
        )


def check_device(device: torch.device, config: dict[str, Any]) -> None:
    """Raises UserError if the device has no attention kernel for the dtype."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            "deepspeed.bf16.enabled: must be possible on a GPU, since flash attention does not support fp32, but "
            f"{torch.cuda.get_device_name(device)} has no bf16 instructions; use a GPU of compute capability 8.0 or "
            "more, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if device.type == "cuda" and not config.get("bf16", {}).get("enabled"):
        raise UserError(
            "deepspeed.bf16.enabled: must be true on a GPU, but is false: flash attention does not support fp32; set "
            "deepspeed=zero1"
        )


def is_partitioned(config: dict[str, Any]) -> bool:
    """Returns whether each rank updates only its own part of the weights, as ZeRO does."""
    return config.get("zero_optimization", {}).get("stage", 0) > 0


def build_engine(
    head: Head,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    config: dict[str, Any],
    num_accumulated: int,
    ranks: Ranks,
) -> DeepSpeedEngine:
    """Returns DeepSpeed's engine for a head, with a config that `check_deepspeed` has accepted."""
    prepare_single_process()
    # DeepSpeed would compile its shared-memory collectives on first use. gloo's are fast enough for a small head.
    __compatible_ops__["deepspeed_shm_comm"] = False
    config = with_fp32_sums(config, num_accumulated)
    zero = config.get("zero_optimization", {})
    if is_partitioned(config):
        # The default gradient bucket takes a gigabyte even if the whole head fits into it. DeepSpeed's own norm copies
        # every gradient into fp64; `GradientClipper` replaces it.
        sizes = [parameter.numel() for parameter in head.parameters()]
        zero = {"reduce_bucket_size": max(sum(sizes) // 8, *sizes), **zero, "compute_grad_norm": False}
    # DeepSpeed would silently skip steps with an overflow. `Trainer.check_finite` stops the run instead.
    bf16 = {"bf16": {**config["bf16"], "check_grad_overflow": False}} if "bf16" in config else {}
    is_first_engine = not dist.is_initialized()
    try:
        engine, *_ = deepspeed.initialize(
            model=head,
            optimizer=optimizer,
            lr_scheduler=schedule,
            dist_init_required=True if ranks.world_size == 1 else None,
            config={
                **config,
                **bf16,
                "zero_optimization": zero,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": num_accumulated,
                "gradient_allreduce_op": "sum",  # the loss is already divided by the number of drafts on all ranks
                "gradient_clipping": 0.0,
                "steps_per_print": 2**31,
                "zero_allow_untested_optimizer": True,
            },
        )
    except ValueError as error:  # pydantic's, of a value that DeepSpeed's config does not take
        raise UserError(
            f"deepspeed: must be a config that DeepSpeed takes, but it says {error_summary(error)}; correct it"
        ) from error
    if is_first_engine:  # DeepSpeed made a group of this process alone
        close_at_exit()
    return engine


class GradientClipper:
    """Clips gradients just before the optimizer step: with ZeRO this rank's part in fp32, otherwise all of them.

    DeepSpeed's own norm copies every gradient into fp64, and is discarded if neither ZeRO nor bf16 is used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float, is_partitioned: bool, ranks: Ranks) -> None:
        """Register with the optimizer. A `max_norm` of 0 computes the norm without clipping."""
        self.norm = torch.zeros((), device=ranks.device)
        """Norm of the last step's gradients over all ranks, f32[]."""
        self._max_norm = max_norm
        self._is_partitioned = is_partitioned
        self._ranks = ranks
        optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self.norm = self._ranks.sum(norm.square()).sqrt() if self._is_partitioned else norm
        if self._max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, self.norm)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm f32[] of all values together, accurate to fp32 rounding.

    A single sum of 10^8 squares on a CPU would lose two percent.
    """
    return torch.nn.utils.get_total_norm([piece for tensor in tensors for piece in tensor.flatten().split(2**17)])


def gather_state(engine: DeepSpeedEngine, keep_here: bool) -> dict[str, torch.Tensor]:
    """Returns fp32 weights and Adam moments on the CPU, by name; {} unless `keep_here`. All ranks must call this."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        whole = _parameter_state(engine, parameter)
        if keep_here:
            state |= {
                name + suffix: tensor.detach().cpu() for suffix, tensor in zip(STATE_SUFFIXES, whole, strict=True)
            }
    return state


def _parameter_state(
    engine: DeepSpeedEngine, parameter: torch.nn.Parameter
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a whole parameter and its moments, gathered from all ranks."""
    if not _has_fp32_master(parameter):
        moments = engine.optimizer.state[parameter]
        return parameter, moments["exp_avg"], moments["exp_avg_sq"]
    first, second = (safe_get_full_optimizer_state(parameter, key) for key in MOMENTS)
    return safe_get_full_fp32_param(parameter), first, second


def _has_fp32_master(parameter: torch.nn.Parameter) -> bool:
    """Returns whether DeepSpeed's optimizer wraps ours and partitions weights and moments, as ZeRO does."""
    return hasattr(parameter, "_hp_mapping")


@torch.no_grad()
def restore_state(engine: DeepSpeedEngine, stored: Callable[[str], torch.Tensor], step: int) -> None:
    """Load weights and moments into an engine that has made no step, and set its schedule to `step`.

    Each rank keeps its part. `stored` returns a whole tensor by its name in `gather_state`. It is called for one tensor
    at a time, because a rank may not have room for all of them.
    """
    # 1. Create the optimizer's state, which it would otherwise create in its first step. With ZeRO, the optimizer's
    # parameters are flat: this rank's part of all parameters, concatenated.
    optimizer = engine.optimizer if isinstance(engine.optimizer, torch.optim.Optimizer) else engine.optimizer.optimizer
    for group in optimizer.param_groups:
        for flat in group["params"]:
            zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
            optimizer.state[flat] = {"step": torch.tensor(float(step), device=flat.device), **zeros}
    # 2. Map parameters to their part of that state. The safe_set_* functions below need this mapping, which DeepSpeed
    # would otherwise create in its first step.
    if engine.optimizer is not optimizer:
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    # 3. Copy weights and moments.
    for name, parameter in engine.module.named_parameters():
        weight, *moments = (stored(name + suffix).to(parameter.device) for suffix in STATE_SUFFIXES)
        parameter.copy_(weight)
        if _has_fp32_master(parameter):
            safe_set_full_fp32_param(parameter, weight)
        for key, moment in zip(MOMENTS, moments, strict=True):
            if _has_fp32_master(parameter):
                safe_set_full_optimizer_state(parameter, moment, key)
            else:
                optimizer.state[parameter][key].copy_(moment)
    # 4. Set the step count and the learning rate.
    engine.global_steps = step
    schedule = engine.lr_scheduler
    schedule.last_epoch, schedule._step_count = step, step + 1
    for group, base, rate in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * rate(step)
