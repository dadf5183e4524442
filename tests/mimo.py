"""Adds an MTP layer to tiny MiMo targets, because `make_target` writes none."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mtptrain.engines.vllm.formats import VllmMimo
from mtptrain.heads.base import Tensors
from mtptrain.heads.files import build_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.target.families import read_target_config

MIMO_HEAD = MtpHead.Config(attention_bias=True, zero_first_embedding=True, prenorm_states=True)
"""The settings that MiMo's own layer has in vLLM."""


def add_mimo_layer(directory: Path) -> Tensors:
    """Adds a random MTP layer, and the class name that engines know, to a tiny MiMo target.

    Returns the layer's tensors under the names of head `mtp`.
    """
    config = json.loads((directory / "config.json").read_text())
    settings = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | settings))
    form = VllmMimo(MIMO_HEAD, read_target_config(directory))
    torch.manual_seed(11)
    state = build_head(MIMO_HEAD, form.target).state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 1:
            state[name] = torch.rand_like(tensor) + 0.5 * ("norm" in name)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | form.tensors(state), directory / "model.safetensors", metadata={"format": "pt"})
    return state
