"""Writes tiny checkpoints with the MTP module that their family publishes, under the published names."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from mtptrain.engines.vllm.formats import VllmNativeMtp
from mtptrain.heads.base import Tensors
from mtptrain.heads.files import build_head
from mtptrain.heads.native_mtp import NativeMtpHead
from mtptrain.target.families import read_target_config
from tests.families import EXACT, write_member

NUM_LAYERS = 4
"""Number of decoder layers of the tiny targets, so the index of a layer behind them."""
BEHIND = tuple(f"model.layers.{NUM_LAYERS}.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""))
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.")
ERNIE = (*(f"model.mtp_{part}.0" for part in ("linear_proj", "emb_norm", "hidden_norm")), "", "model.mtp_block.0.")
MIMO_V2 = tuple(f"model.mtp.layers.0.{part}" for part in ("eh_proj", "enorm", "hnorm", "final_layernorm", ""))
MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), BEHIND),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN),
    "ernie4_5_moe": ERNIE,
    "mimo_v2_flash": MIMO_V2,
}
"""The published names of each family's projection, its norms of embedding and state and its final norm, and the prefix
of its decoder layer, whose tensors are named as in the target's own layers."""
LAST_LAYER: dict[str, dict[str, object]] = {
    "mimo_v2_flash": {
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    }
}
"""Settings with which a target's last layer is of the module's kind."""


@torch.no_grad()
def write_checkpoint(directory: Path, family: str, **settings: Any) -> tuple[PreTrainedConfig, Tensors]:
    """Write a tiny target, and a random module if its family publishes them.

    Returns the config, and the tensors of the module, or of a head for another family, under the head's names.
    """
    directory.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(3)
    model_type, own = EXACT[family]
    write_member(directory, model_type, {**own, **LAST_LAYER.get(family, {}), **settings})
    config = read_target_config(directory)
    state = build_head(NativeMtpHead.Config(), config).state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.uniform_(-0.1, 0.1)
        else:
            tensor.normal_(0, 0.15)
    if family in MODULES:
        path, stored = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
        tensors, module = load_file(path), VllmNativeMtp(NativeMtpHead.Config(), config).tensors(state)
        if MODULES[family] == BEHIND:  # published with copies of the target's tensors
            copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
            module |= {f"{BEHIND[-1]}{x}.weight": tensors[f"{own}.weight"].clone() for x, own in copies.items()}
        tensors |= {name: tensor.contiguous() for name, tensor in module.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        count = "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers"
        (directory / "config.json").write_text(json.dumps(stored | {count: 1}))
    return config, state
