"""Decides the precision of every stage whose dtype is `auto`.

`auto` stands for bfloat16 where this machine computes it fast: on a GPU, and on a CPU with bf16 instructions. Elsewhere
it stands for float32, because products in bfloat16 would take ten to a hundred times as long. A stage that has begun
keeps its precision on every machine, since `stage.json` in its folder records it. `acceptance.dtype` is an exception:
see `resolve_acceptance_dtype`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtptrain.settings.data import AnsweringEngine, Dtype
from mtptrain.settings.hardware import has_gpu
from mtptrain.stage_dir import StageDir
from mtptrain.utils.cpu import has_bf16_instructions
from mtptrain.utils.errors import UserError, warn

AUTO = "auto"


def fast_dtype(on_gpu: bool) -> tuple[Dtype, str]:
    """Returns the dtype of `auto` for extraction, responses and training, and the reason."""
    if on_gpu and has_gpu():  # a plan may be made for GPUs that this machine does not have
        import torch

        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return Dtype.float32, f"because {torch.cuda.get_device_name()} has no bf16 instructions"
    if on_gpu:
        return Dtype.bfloat16, "because this machine has a GPU"
    if has_bf16_instructions():
        return Dtype.bfloat16, "because this CPU has bf16 instructions"
    return Dtype.float32, "because this CPU has no bf16 instructions that torch uses"


def resolve_dtype(setting: Dtype, stage_dir: Path, on_gpu: bool) -> Dtype:
    """Returns the dtype that a stage computes in: as set, else as the stage began, else the fast one."""
    if setting != AUTO:
        return setting
    began = _began_with(stage_dir, lambda config: Dtype(config[stage_dir.name]["dtype"]))
    return fast_dtype(on_gpu)[0] if began is None else began


def resolve_answering(setting: AnsweringEngine, stage_dir: Path) -> AnsweringEngine:
    """Returns the engine that generates responses: as set, else as the stage began, else still `auto`."""
    if setting != AUTO:
        return setting
    return _began_with(stage_dir, lambda config: AnsweringEngine(config[stage_dir.name]["engine"])) or setting


def resolve_deepspeed(deepspeed: dict[str, Any], stage_dir: Path, on_gpu: bool) -> dict[str, Any]:
    """Returns DeepSpeed's config with `auto` replaced in `bf16.enabled` and `zero_optimization.stage`.

    The stage is 1 with bf16, whose fp32 weights it divides among the ranks, and 0 with fp32.
    """
    bf16, zero = deepspeed.get("bf16", {}), deepspeed.get("zero_optimization", {})
    if not isinstance(bf16, dict) or not isinstance(zero, dict):
        return deepspeed  # refused by `check_deepspeed`
    is_bf16 = bf16.get("enabled", False)
    if is_bf16 == AUTO:
        began = _began_with(stage_dir, lambda config: train_dtype(config["deepspeed"]))
        is_bf16 = (began or fast_dtype(on_gpu)[0]) is Dtype.bfloat16
    if is_bf16 not in (True, False):
        raise UserError(f"deepspeed.bf16.enabled: must be true, false or auto, but is {is_bf16!r}; correct it")
    stage = zero.get("stage", 0)
    return {
        **deepspeed,
        **({"bf16": {**bf16, "enabled": is_bf16}} if bf16 else {}),
        **({"zero_optimization": {**zero, "stage": int(is_bf16) if stage == AUTO else stage}} if zero else {}),
    }


def train_dtype(deepspeed: dict[str, Any]) -> Dtype:
    """Returns the dtype in which DeepSpeed computes with a config without `auto`."""
    return Dtype.bfloat16 if deepspeed.get("bf16", {}).get("enabled") else Dtype.float32


def with_fp32_sums(config: dict[str, Any], num_accumulated: int) -> dict[str, Any]:
    """Returns DeepSpeed's config, changed to accumulate the gradients of several micro-batches in fp32 on each rank.

    One micro-batch and fp32 weights do not need this. ZeRO 1 becomes ZeRO 2, because with fp32 sums DeepSpeed passes no
    gradients to the trainer's clipping in ZeRO 1; `data_types.grad_accum_dtype=bf16` prevents both.
    """
    if num_accumulated == 1 or not config.get("bf16", {}).get("enabled") or config.get("data_types"):
        return config
    in_zero_2 = {**config["zero_optimization"], "stage": 2}
    return {**config, "zero_optimization": in_zero_2, "data_types": {"grad_accum_dtype": "fp32"}}


def resolve_acceptance_dtype(setting: Dtype, on_gpu: bool) -> Dtype:
    """Returns the dtype of validation and acceptance: as set, else bfloat16 on a GPU that has it, where engines use it
    too, and float32 on a CPU, where all counters then equal an engine's."""
    if setting != AUTO:
        return setting
    return fast_dtype(on_gpu)[0] if on_gpu else Dtype.float32


def announce_precision(name: str, dtype: Dtype) -> None:
    """Print which precision a program computes in by a setting, and why. Only one rank should call this."""
    on_gpu = has_gpu()
    fast, reason = fast_dtype(on_gpu)
    if dtype == fast:
        print(f"{name}: {dtype}, {reason}")
    elif dtype == Dtype.float32:
        device = "a GPU" if on_gpu else "this CPU"
        print(f"{name}: {dtype}, as set or as this run began; {device} computes {fast} fast too")
    else:
        warn(
            f"{name}: should be float32 on this machine, {reason}, but is {dtype}, as set or as this run began: matrix "
            "products may take ten to a hundred times as long; leave it out and choose another run_dir"
        )


def _began_with(stage_dir: Path, find: Callable[[Any], Any]) -> Any:
    """Returns a value of the config that a stage began with; None if it has not begun or did not have the setting."""
    settings = StageDir(stage_dir).settings()
    try:
        return None if settings is None else find(settings)
    except KeyError:
        return None
