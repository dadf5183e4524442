"""Defines the breaks of a served head: changes to one part of its directory that must change vLLM's counters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtptrain.engines.mimo import MIMO_LAYER
from mtptrain.utils.files import tensor_shapes

Break = Callable[[Path], None]
"""A function that changes an exported directory in place."""


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Returns a break that changes one tensor, given by the engine's name."""

    def apply(directory: Path) -> None:
        path = next(path for path in directory.glob("*.safetensors") if name in tensor_shapes(path))
        tensors = load_file(path)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def swapped(*names: str) -> Break:
    """Returns a break that swaps the two halves of each weight's input columns."""

    def apply(directory: Path) -> None:
        for name in names:
            changed(name, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))(directory)

    return apply


def one_layer_later(directory: Path) -> None:
    """Makes the engine capture each stream one layer later than the head was trained with."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ids = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]}
    path.write_text(json.dumps(config | ids | {"eagle_config": ids}))


def configured(**settings: Any) -> Break:
    """Returns a break that changes settings of the head's config."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return apply


def another_lm_head(directory: Path) -> None:
    path = directory / "lm_head.safetensors"
    save_file({name: tensor.roll(1, 0) for name, tensor in load_file(path).items()}, path)


def changed_dflash(**settings: Any) -> Break:
    """Returns a break that changes settings of `dflash_config`."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"dflash_config": config["dflash_config"] | settings}))

    return apply


def without_norms(*names: str) -> dict[str, Break]:
    """Returns a break for each norm, by name. The break sets the norm's weights to one."""
    return {name: changed(name + ".weight", torch.ones_like) for name in names}


EAGLE3_NORMS = without_norms(
    "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
)
BREAKS: dict[str, dict[str, Break]] = {
    "mtp": without_norms("enorm", "hnorm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    | {"columns": swapped("fc.weight")},
    "mtp_mimo": without_norms(
        *(f"{MIMO_LAYER}{name}_layernorm" for name in ("token", "hidden", "input", "post_attention", "final"))
    )
    | {"columns": swapped(f"{MIMO_LAYER}input_proj.weight")}
    | {f"{part}_bias": changed(f"{MIMO_LAYER}self_attn.{part}_proj.bias", torch.zeros_like) for part in "qkv"},
    "eagle": without_norms("layers.0.post_attention_layernorm") | {"columns": swapped("fc.weight")},
    "eagle3": EAGLE3_NORMS
    | {"columns": swapped(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")), "layer_ids": one_layer_later},
    "eagle3_norms_before": without_norms("input_norm"),
    "eagle3_1": without_norms("fc_norm.0", "fc_norm.1", "fc_norm.2"),
    "dflash": without_norms(
        "hidden_norm",
        "norm",
        *(f"layers.0.{norm}_layernorm" for norm in ("input", "post_attention")),
        *(f"layers.0.self_attn.{part}_norm" for part in "qk"),
    )
    | {
        "layer_ids": changed_dflash(target_layer_ids=[1, 2, 3]),
        "mask_token": changed_dflash(mask_token_id=3),
        "two_ways": configured(is_causal=True),
    },
    "draft_model": without_norms("model.norm"),
    "peagle": {"mask_hidden": changed("mask_hidden", torch.neg), "mask_token": configured(mask_token_id=3)},
    "medusa": {"blocks": changed("blocks.0.layers.0.weight", torch.neg), "lm_head": another_lm_head},
}
"""The breaks of each kind of head, by name."""
SEQUENTIAL_BREAKS: dict[str, dict[str, Break]] = {
    "dflash2": {
        "selector": changed("candidate_selector.successor_codebook", torch.neg),
        "attention_conv": changed("layers.0.attention_conv.base_kernel", lambda kernel: kernel.flip(0, 1)),
        "mlp_conv": changed("layers.0.mlp_conv.kernel_projection.weight", torch.neg),
    },
    "dspark_fill_in_one_layer": {"markov_head": changed("markov_head.markov_w2.weight", torch.neg)},
}
"""Those of heads that vLLM serves here with a plugin alone."""
