"""Writes tiny quantised targets in formats of compressed-tensors, as llm-compressor saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

GROUP_SIZE = 32
INTEGERS = {"type": "int", "symmetric": True}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": (  # weights and activations
        "int-quantized",
        {
            "weights": {**INTEGERS, "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INTEGERS, "num_bits": 8, "strategy": "token", "dynamic": True},
        },
    ),
    "int4": (  # weights only; llm-compressor saves its AWQ and GPTQ models in this format
        "pack-quantized",
        {"weights": {**INTEGERS, "num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}},
    ),
}


def int8_weight(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the stored tensors of a weight with one scale per row, and the weight that they stand for."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def int4_weight(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the stored tensors of a weight with one scale per group, and the weight that they stand for.

    Eight values of four bits are packed into each int32, the first one in the lowest bits.
    """
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scale = groups.abs().amax(2) / 7.5
    values = (groups / scale[..., None]).round().clamp(-8, 7)
    nibbles = (values.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
    packed = (nibbles << (4 * torch.arange(8, dtype=torch.int32))).sum(2, dtype=torch.int32)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return stored, (values * scale[..., None]).flatten(1)


def quantise(source: Path, directory: Path, name: str, lm_head: bool = False) -> dict[str, torch.Tensor]:
    """Writes a copy of a target whose projections are quantised, and returns its weights after dequantisation.

    With `lm_head`, that is quantised too.
    """
    shutil.copytree(source, directory)
    stored, dequantised = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        stored[key] = dequantised[key] = tensor
        if key.endswith("proj.weight") or (lm_head and key == "lm_head.weight"):
            parts, dequantised[key] = (int8_weight if name == "int8" else int4_weight)(stored.pop(key).float())
            stored |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    layout, scheme = FORMATS[name]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [] if lm_head else ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear", *["lm_head"] * lm_head], **scheme}},  # vLLM needs the name
    }
    (directory / "config.json").write_text(json.dumps(config))
    return dequantised


def compress(source: Path, directory: Path, preset: str, kind: str = "Linear") -> None:
    """Writes a copy of a target in which compressed-tensors itself quantised all modules of a kind in bf16."""
    shutil.copytree(source, directory)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme(preset, [kind, "lm_head"])  # vLLM needs the name
    args = scheme.weights
    assert args is not None
    args.group_size, args.block_structure = args.group_size and 32, args.block_structure and [32, 32]
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    for module in (each for each in model.modules() if hasattr(each, "quantization_scheme")):
        weight = module.weight.float()
        shape = {"channel": (1, -1), "block": (32, 32)}.get(args.strategy, (1, 32))
        blocks = weight.unflatten(1, (-1, shape[1] if shape[1] > 0 else weight.shape[1])).unflatten(0, (-1, shape[0]))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        if args.strategy == "tensor":
            low, high = low.amin(), high.amax()
        factor = generate_gparam(weight.min(), weight.max()) if hasattr(module, "weight_global_scale") else None
        scale, zero_point = calculate_qparams(low, high, args, factor)
        found = {"weight_scale": scale, "weight_zero_point": zero_point, "weight_global_scale": factor}
        for name, value in found.items():
            if hasattr(module, name):
                getattr(module, name).data.copy_(value)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(directory))
