"""Reads the weight of a quantised module as transformers computes with it, by the package compressed-tensors."""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from mtptrain.target.form import build_on_meta
from mtptrain.utils.errors import UserError, refusing, warn

METHOD = "compressed-tensors"


def names_lm_head(config: PreTrainedConfig) -> bool:
    """Returns whether `targets` in the config of compressed-tensors name lm_head, as vLLM and SGLang want it."""
    settings = getattr(config, "quantization_config", None) or {}
    groups, ignore = (
        (settings.get("config_groups") or {}).values(),
        settings.get("ignore") or (),
    )  # a scheme each, or the targets of one by its name
    targets = [name for each in groups for name in (each if isinstance(each, list) else each.get("targets", ()))]
    named, ignored = ([x for x in each if re.match(x.removeprefix("re:"), "lm_head")] for each in (targets, ignore))
    return bool(named and not ignored)


def quantised_modules(
    target_dir: Path, config: PreTrainedConfig, names: list[str], are_outputs: bool = False
) -> dict[str, nn.Module]:
    """Returns modules without weights, by name, which `dequantised` gives theirs.

    Raises:
        UserError: if their format is not one of compressed-tensors, or activations of `are_outputs` are quantised too.
    """
    if not names:
        return {}
    settings, path = getattr(config, "quantization_config", None) or {}, target_dir / "config.json"
    model, method = build_on_meta(config), settings.get("quant_method", "no quant_method")
    if method == METHOD:
        advice = f"install it: pip install 'mtptrain[quantised]'; or correct quantization_config in {path}"
        with refusing(f"target.path: {', '.join(names)} must be readable by {METHOD}", advice, METHOD):
            from compressed_tensors.quantization import apply_quantization_config

            quantiser = AutoHfQuantizer.from_config(deepcopy(settings), pre_quantized=True)
            apply_quantization_config(model, quantiser.compressor.quantization_config)
    modules = dict(model.named_modules())
    for name in names:
        scheme = getattr(modules.get(name), "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            value = f"{method} and no scheme"
        elif are_outputs and (scheme.input_activations or scheme.output_activations):
            value = "quantised activations"
        else:
            continue
        raise UserError(
            f"target.path: {name} must be unquantised, or its weight {'alone ' * are_outputs}quantised by {METHOD}, "
            f"because training computes with the weight as such, but quantization_config in {path} has {value} for "
            "it; choose a checkpoint in which this module is not quantised"
        )
    if are_outputs and not names_lm_head(config):
        warn(
            f"target.path: targets of config_groups in {path} should name lm_head, because vLLM 0.32 and SGLang 0.5.23 "
            'otherwise load no quantised one, but do not ("Linear" is not enough); add "lm_head" to them'
        )
    return {name: modules[name] for name in names}


def dequantised(module: nn.Module, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a weight [D, H] in fp32, of a module of `quantised_modules` and its stored tensors by name.

    The product of a stored number and its scale is exact in fp32, so that rounding it to another dtype gives what the
    product in that dtype is.
    """
    from compressed_tensors.compressors.base import decompress_module
    from compressed_tensors.utils import replace_direct_state_dict

    in_fp32 = {name: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for name, x in stored.items()}
    replace_direct_state_dict(module, in_fp32)
    decompress_module(module)
    weight: torch.Tensor = module.get_parameter("weight").float()
    return weight
