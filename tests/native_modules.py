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
ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
QUERY_KEY_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
LATENT_ATTENTION = [
    f"self_attn.{part}"
    for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def experts(count: int, shared: str) -> list[str]:
    """Returns the names of the parts of a mixture: `count` routed experts, the shared one, and the router."""
    parts = [part.removeprefix("mlp.") for part in MLP]
    return [f"mlp.{one}.{part}" for one in (*(f"experts.{i}" for i in range(count)), shared) for part in parts] + [
        "mlp.gate"
    ]


def behind(layer: list[str]) -> list[str]:
    """Returns the names of a module behind the decoder layers."""
    parts = ["enorm", "hnorm", "eh_proj", "shared_head.norm", *NORMS, *layer]
    return [f"model.layers.{NUM_LAYERS}.{part}" for part in parts]


def qwen(layer: list[str]) -> list[str]:
    """Returns the names of a module of Qwen's families."""
    outside = ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    return [f"mtp.{part}" for part in outside] + [f"mtp.layers.0.{part}" for part in NORMS + ATTENTION + layer]


MIMO_V2 = ["enorm", "hnorm", "eh_proj", "final_layernorm", "input_layernorm", "pre_mlp_layernorm"]
QWEN_EXPERTS = [*QUERY_KEY_NORMS, *experts(8, "shared_expert"), "mlp.shared_expert_gate"]
MODULES: dict[str, list[str]] = {
    "deepseek_v3": behind(LATENT_ATTENTION + experts(8, "shared_experts")),
    "glm4_moe": behind(ATTENTION + experts(8, "shared_experts")),
    "qwen3_next": qwen(QWEN_EXPERTS),
    "qwen3_5_text": qwen(QUERY_KEY_NORMS + MLP),
    "qwen3_5_moe_text": qwen(QWEN_EXPERTS),
    "ernie4_5_moe": [f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")]
    + [f"model.mtp_block.0.{part}" for part in NORMS + ATTENTION + MLP],
    "mimo_v2_flash": [f"model.mtp.layers.0.{part}" for part in (*MIMO_V2, *ATTENTION, *MLP)],
}
"""The published names of each family's module, without `.weight`, and without its copies of the target's tensors."""
OTHER_NAMES = {
    "deepseek_v3": {f"model.layers.{NUM_LAYERS}.mlp.gate.e_score_correction_bias"},
    "glm4_moe": {f"model.layers.{NUM_LAYERS}.mlp.gate.e_score_correction_bias"},
    "mimo_v2_flash": {"model.mtp.layers.0.self_attn.attention_sink_bias"},
}


def published_names(family: str) -> set[str]:
    """Returns the names of the tensors of a family's module, without its copies of the target's."""
    return {f"{name}.weight" for name in MODULES[family]} | OTHER_NAMES.get(family, set())


@torch.no_grad()
def write_checkpoint(directory: Path, family: str, **settings: Any) -> tuple[PreTrainedConfig, Tensors]:
    """Write a tiny target, and a random module if its family publishes them.

    Returns the config, and the tensors of the module, or of a head for another family, under the head's names.
    """
    directory.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(3)
    model_type, own = EXACT[family]
    write_member(directory, model_type, {**own, **settings})
    config = read_target_config(directory)
    state = build_head(NativeMtpHead.Config(), config).state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.uniform_(-0.1, 0.1)
        else:
            tensor.normal_(0, 0.15)
    if family in MODULES:
        add_module(directory, config, state)
    return config, state


def add_module(directory: Path, config: PreTrainedConfig, state: Tensors) -> None:
    """Add a module to a checkpoint, given its tensors under the head's names."""
    module = VllmNativeMtp(NativeMtpHead.Config(), config).tensors(state)
    if any(
        name.startswith(f"model.layers.{NUM_LAYERS}.") for name in module
    ):  # published with copies of the target's tensors
        tensors = load_file(directory / "model.safetensors")
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        module |= {
            f"model.layers.{NUM_LAYERS}.{ours}.weight": tensors[f"{theirs}.weight"].clone()
            for ours, theirs in copies.items()
        }
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: tensor.contiguous() for name, tensor in module.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((directory / "config.json").read_text())
    name = "mtp_num_hidden_layers" if config.model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    (directory / "config.json").write_text(json.dumps(stored | {name: 1}))
