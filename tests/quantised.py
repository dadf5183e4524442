"""Writes tiny quantised targets in the compressed-tensors format, as llm-compressor saves them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


def quantise(source: Path, directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Writes a copy of a target whose projections are quantised, and returns its weights after dequantisation."""
    shutil.copytree(source, directory)
    stored, dequantised = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        stored[key] = dequantised[key] = tensor
        if key.endswith("proj.weight"):
            parts, dequantised[key] = (int8_weight if name == "int8" else int4_weight)(stored.pop(key).float())
            stored |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    layout, scheme = FORMATS[name]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return dequantised
