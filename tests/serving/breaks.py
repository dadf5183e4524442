"""Defines the breaks of a served head: changes to one part of its directory that must change vLLM's counters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtptrain.engines.exports import LAYER_IDS
from mtptrain.engines.mimo import MIMO_LAYER
from mtptrain.heads.mtp import swap_halves
from mtptrain.utils.files import tensor_shapes

CONFIG = "config.json"


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0)


def one_layer_later(config: dict[str, Any]) -> dict[str, Any]:
    ids = {LAYER_IDS: [layer + 1 for layer in config[LAYER_IDS]]}
    return ids | {"eagle_config": ids}


def in_dflash_config(**settings: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {"dflash_config": config["dflash_config"] | settings}


BREAKS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "mtp": {"columns": ("fc.weight", swap_halves), "hnorm": ("hnorm.weight", torch.ones_like)},
    "mtp_mimo": {
        "columns": (f"{MIMO_LAYER}input_proj.weight", swap_halves),
        "bias": (f"{MIMO_LAYER}self_attn.q_proj.bias", torch.zeros_like),
        "norm": (f"{MIMO_LAYER}final_layernorm.weight", torch.ones_like),
    },
    "eagle": {"columns": ("fc.weight", swap_halves)},
    "eagle3": {"layer_ids": (CONFIG, one_layer_later), "norm": ("midlayer.hidden_norm.weight", torch.ones_like)},
    "eagle3_norms_before": {"norm": ("input_norm.weight", torch.ones_like)},
    "eagle3_1": {"norm": ("fc_norm.1.weight", torch.ones_like)},
    "dflash": {
        "key_norm": ("layers.0.self_attn.k_norm.weight", torch.ones_like),
        "layer_ids": (CONFIG, in_dflash_config(target_layer_ids=[1, 2, 3])),
        "mask_token": (CONFIG, in_dflash_config(mask_token_id=3)),
        "two_ways": (CONFIG, lambda _: {"is_causal": True}),
    },
    "draft_model": {"norm": ("model.norm.weight", torch.ones_like)},
    "peagle": {"mask_hidden": ("mask_hidden", torch.neg), "mask_token": (CONFIG, lambda _: {"mask_token_id": 3})},
    "medusa": {"blocks": ("blocks.0.layers.0.weight", torch.neg), "lm_head": ("lm_head.weight", rolled)},
    "dflash2": {
        "selector": ("candidate_selector.successor_codebook", torch.neg),
        "attention_conv": ("layers.0.attention_conv.base_kernel", lambda kernel: kernel.flip(0, 1)),
        "mlp_conv": ("layers.0.mlp_conv.kernel_projection.weight", torch.neg),
    },
    "mlx eagle3": {
        "layer_ids": (CONFIG, one_layer_later),
        "norm": ("layers.0.hidden_norm.weight", rolled),
        "lm_head": ("lm_head.weight", rolled),
    },
    "mlx eagle3 without effect": {"embeddings": ("embed_tokens.weight", rolled)},
    "mlx dflash": {
        "layer_ids": (CONFIG, in_dflash_config(target_layer_ids=[1, 2, 3])),
        "norm": ("hidden_norm.weight", rolled),
    },
    "mlx draft_model": {"norm": ("model.norm.weight", rolled)},
    "dspark_fill_in_one_layer": {"markov_head": ("markov_head.markov_w2.weight", torch.neg)},
}
"""For each head, by name: a tensor under the engine's name, or config.json, and how it is changed."""


def damage(directory: Path, head: str, broken: str) -> None:
    """Changes one part of a served head's directory."""
    name, change = (BREAKS[head] | BREAKS.get(f"{head} without effect", {}))[broken]
    if name == CONFIG:
        config = json.loads((directory / CONFIG).read_text())
        (directory / CONFIG).write_text(json.dumps(config | change(config)))
        return
    path = next(path for path in directory.glob("*.safetensors") if name in tensor_shapes(path))
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, path, metadata={"format": "pt"})
