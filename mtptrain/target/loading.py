"""Loads the whole frozen target, after checks that need no weights, and compares it with the model's own forward."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from mtptrain.target.causal_attention import MaskOf
from mtptrain.target.families import TEXT_MODEL_NAMES, read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import PLAIN_DTYPES, check_parts, check_weights, refuse_missing
from mtptrain.target.hub import INDEX, weight_files
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import read_json, tensor_shapes

FITTING_SHARE = 0.8
"""Largest share of a GPU's memory for the target's weights. `load_target` spreads larger targets over several GPUs."""

SHORT = 6
"""Windows, chunks and other limits of attention in the check, in tokens."""
LIMITS = ("sliding_window", "attention_chunk_size", "index_topk", "floor_scale")
"""Settings of transformers' configs that limit how far a token sees, or change attention after so many tokens."""
NUM_TOKENS, NUM_PROMPT_TOKENS, NUM_DRAFTS = 16, 9, 3
EXACT, ROUNDED = 1e-3, 0.1
"""Largest difference from the model's own results, in shares of their size: in a model whose weights are all in fp32 at
any token, and at the median token in one that rounds more, where a mixture may choose another expert."""


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
    files = TargetFiles(target_dir)
    config, ends = files.config, files.generation.eos_token_ids
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
        for module in (each for each in model.modules() if hasattr(each, "quantization_scheme")):
            module.weight.data = module.weight.data.to(dtype)  # weights of 4-bit floats become bf16
    model.generation_config.eos_token_id = list(ends)
    target = Target(model)
    check_target(target)
    return target


def check_placement(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target that `load_target` could not place, before any long work."""
    check_parts(target_dir, check_weights(target_dir))
    if (index := target_dir / INDEX).is_file():  # transformers would end in a KeyError
        read_json(index, 'add "metadata": {}, which transformers reads', ["metadata"])
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
    with refusing(
        "target.path: transformers must be able to run the quantised weights that quantization_config in "
        f"{target_dir / 'config.json'} describes",
        "install what it names, or run this target in vLLM only: hidden_states.backend=vllm, "
        "train.validation_prompts=0, and mtptrain serving-bench for its acceptance",
    ):
        quantiser = AutoHfQuantizer.from_config(deepcopy(quantisation), pre_quantized=True)
        quantiser.validate_environment(dtype=dtype, device_map={"": device})


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


@torch.no_grad()
def check_target(target: Target) -> None:
    """Compare logits of texts, with and without rejected drafts, with those of the model's own forward.

    So a target is supported if it passes. The texts are short, and windows and chunks are made shorter still while they
    are read, so that a text is longer than any of them.
    """
    ids = check_texts(target)
    positions = torch.arange(NUM_TOKENS, device=target.device).repeat(len(ids), 1)
    with short_limits(target):
        with running(target, "the forward of transformers"), target.attention("eager"):
            own = target.model(input_ids=ids, use_cache=False).logits.to(target.device)
        if not own.isfinite().all():
            damaged = (name for name, weight in target.model.named_parameters() if not weight.isfinite().all())
            raise UserError(
                f"target.path: weights and logits must be finite, but {next(damaged, 'the logits of a text')} of a "
                f"{target.config.model_type} in {own.dtype} has NaN or infinity; download the target again"
            )
        with running(target, "the forward of a text over a cache"):
            whole = target.forward(ids, positions, target.cache(NUM_TOKENS), (len(target.layers),))
            refuse_difference(target, "the logits of a text", target.logits(whole.postnorm_states), own)
            last = whole.read_by((len(target.layers),))[..., 0, :]
            rebuilt = target.parts.logits(target.parts.final_norm(last))
            refuse_difference(target, "the logits of the last stream", rebuilt, own)
            reread = _with_rejected_drafts(target, ids, positions)
            # Only the tokens after the prompt: the median must not be that of a prompt.
            ours, theirs = target.logits(reread[:, NUM_PROMPT_TOKENS:]), own[:, NUM_PROMPT_TOKENS:]
            refuse_difference(target, "the logits after rejected drafts", ours, theirs)


def check_texts(target: Target) -> torch.Tensor:
    """Returns the token ids [2, NUM_TOKENS] of the texts of the check."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.config.vocab_size, (2, NUM_TOKENS), generator=generator).to(target.device)


def _with_rejected_drafts(target: Target, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the post-norm states of texts, whose tokens after the prompt are read after other ones in their place."""
    cache = target.cache(NUM_TOKENS + NUM_DRAFTS)
    states = [target.forward(ids[:, :NUM_PROMPT_TOKENS], positions[:, :NUM_PROMPT_TOKENS], cache).postnorm_states]
    for start in range(NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_DRAFTS):
        drafts = positions[:, :NUM_DRAFTS] + start
        target.forward(ids[:, :NUM_DRAFTS], drafts, cache)
        read = slice(start, min(start + NUM_DRAFTS, NUM_TOKENS))
        states.append(target.forward(ids[:, read], positions[:, read], cache).postnorm_states)
    return torch.cat(states, dim=1)


@contextmanager
def short_limits(target: Target) -> Iterator[None]:
    """Makes windows and chunks of attention at most `SHORT` inside this context."""
    form, places = target.form, [target.config, *target.model.modules()]
    found = [(place, name, getattr(place, name)) for place in places for name in LIMITS if hasattr(place, name)]
    changed = [(place, name, value) for place, name, value in found if isinstance(value, int) and value > SHORT]
    for place, name, _ in changed:
        setattr(place, name, SHORT)
    masks = (mask and MaskOf(*(size and min(size, SHORT) for size in astuple(mask))) for mask in form.masks)
    target.form = replace(form, masks=tuple(masks))
    try:
        yield
    finally:
        target.form = form
        for place, name, value in changed:
            setattr(place, name, value)


def running(target: Target, step: str) -> AbstractContextManager[None]:
    """Makes an error of the model's code in a step a refusal of the target."""
    return refusing(f"target.path: {step} must run for a {target.config.model_type}", "choose another target")


def refuse_difference(target: Target, name: str, ours: torch.Tensor, own: torch.Tensor) -> None:
    """Raises UserError if states or logits [..., D] are not the model's own."""
    size = own.float().norm(dim=-1)
    errors = (ours.float() - own.float()).norm(dim=-1) / size.clamp(min=1e-9)
    is_quantised = getattr(target.config, "quantization_config", None) is not None
    # Not by the logits: some families return them in fp32 in any case.
    dtypes = {weight.dtype for weight in target.model.parameters() if weight.is_floating_point()}
    is_exact = dtypes <= {torch.float32, torch.float64} and not is_quantised
    error, tolerance = float(errors.max() if is_exact else errors.median()), EXACT if is_exact else ROUNDED
    if not error <= tolerance:
        raise UserError(
            f"target.path: {name} must be those of transformers' own forward, to within {tolerance:g}, but differ by "
            f"{error:.2g} for a {target.config.model_type} in {own.dtype}: mtptrain cannot run this model; choose "
            "another target"
        )
