"""Loads the whole frozen target, after checks that need no weights."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from mtptrain.target.families import TEXT_MODEL_NAMES, read_target_config
from mtptrain.target.frozen_parts import PLAIN_DTYPES, check_weights, refuse_missing
from mtptrain.target.hub import weight_files
from mtptrain.target.model import Target
from mtptrain.target.self_check import check_target
from mtptrain.utils.errors import UserError, error_summary
from mtptrain.utils.files import tensor_shapes

FITTING_SHARE = 0.8
"""Largest share of a GPU's memory for the target's weights. `load_target` spreads larger targets over several GPUs."""


@contextmanager
def without_transformers_bar() -> Iterator[None]:
    """Keeps transformers from drawing a bar of its own, on every rank, into the programs' bars."""
    shows_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bar:
            logging.enable_progress_bar()


def load_target(target_dir: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """Returns the whole target on one device, or spread over several by accelerate if it does not fit."""
    config = read_target_config(target_dir)
    check_placement(target_dir, dtype, device)
    placement = "auto" if needs_several_devices(target_dir, dtype, device) else device
    with without_transformers_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target_dir,
            config=config,
            dtype=dtype,
            device_map=placement,
            trust_remote_code=False,
            attn_implementation="eager",  # the model's own attention, with which `check_target` compares ours
            output_loading_info=True,
            key_mapping=TEXT_MODEL_NAMES,
        )
    model, loading = loaded
    # transformers initialises missing tensors at random and only logs a warning.
    refuse_missing(target_dir, loading["missing_keys"])
    if hasattr(model, "ct_decompress_hook"):
        # compressed-tensors restores the weights when the whole model is first called, but `Target` calls parts of it.
        model.hf_quantizer.compressor.decompress_model(model)
    target = Target(model)
    check_target(target)
    return target


def check_placement(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target that `load_target` could not place, before any long work."""
    check_weights(target_dir)
    check_quantisation(target_dir, dtype, device)
    if needs_several_devices(target_dir, dtype, device) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"target.path: {target_dir} must fit one device if several ranks share a machine, but does not; start one "
            "process, which spreads it over all devices; in training, set train.validation_prompts=0"
        )


def check_quantisation(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a quantised target if transformers lacks the package or the hardware that its format needs."""
    quantisation = getattr(read_target_config(target_dir), "quantization_config", None)
    if quantisation is None:
        return
    try:
        quantiser = AutoHfQuantizer.from_config(deepcopy(quantisation), pre_quantized=True)
        quantiser.validate_environment(dtype=dtype, device_map={"": device})
    except Exception as error:  # each quantiser checks its section in its own way, such as pydantic's ValidationError
        raise UserError(
            "target.path: transformers must be able to run the quantised weights that quantization_config in "
            f"{target_dir / 'config.json'} describes, but reports {error_summary(error)}; install what it names, or "
            "run this target in vLLM only: hidden_states.backend=vllm, train.validation_prompts=0, and "
            "mtptrain serving-bench for its acceptance"
        ) from error


def needs_several_devices(target_dir: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether weights take more than `FITTING_SHARE` of a GPU's memory, and there are several GPUs."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    return weights_bytes(target_dir, dtype) > FITTING_SHARE * torch.cuda.get_device_properties(device).total_memory


def weights_bytes(target_dir: Path, dtype: torch.dtype) -> int:
    """Returns the memory that a target's weights take in `dtype`; quantised ones are as large as on disk."""
    files = weight_files(target_dir)
    stored = [each for path in files for each in tensor_shapes(path).values()]
    return sum(path.stat().st_size for path in files) + sum(
        math.prod(shape) * (dtype.itemsize - int(kind[-2:]) // 8)  # such as 16 of BF16
        for kind, shape in stored
        if kind in PLAIN_DTYPES
    )
