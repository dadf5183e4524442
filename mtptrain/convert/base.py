"""How an engine reads a head: names and columns of tensors, `config.json`, and the launch command."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from mtptrain.heads.config import HeadConfig
from mtptrain.heads.layers import head_dims
from mtptrain.target.families import head_rope_parameters

Tensors = dict[str, torch.Tensor]

LAYER_PARTS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""Of a decoder layer, as every head and every engine names them."""


class Format(ABC):
    """One kind of head for one engine, for a target; see `FORMATS`, and `LIMITS` for what is refused."""

    architecture: str
    """The class of the engine that loads it, as `config.json` names it."""
    method: str
    """What the engine calls its way of drafting."""
    hf_overrides: dict[str, object] | None = None
    """What vLLM must be told about the target."""
    weights_name = "model.safetensors"
    """File of the head's tensors."""
    names: dict[str, str]
    """The engine's names of the head's tensors; those that are not here keep theirs."""

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        """Use `format_for`, which refuses what the engine does not serve."""
        self.head = head
        self.target = target
        self.dims = head_dims(head, target, getattr(head, "head_dim", None))

    def tensors(self, state: Tensors) -> Tensors:
        """The engine's tensors from the head's `state_dict`."""
        return rename(state, self.names)

    def state(self, tensors: Tensors) -> Tensors:
        """The inverse of `tensors`."""
        return rename(tensors, {new: old for old, new in self.names.items()})

    @abstractmethod
    def config_json(self, dtype: str) -> dict[str, Any]:
        """`config.json` beside the tensors; `dtype` is theirs."""

    @abstractmethod
    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        """What serves the target with the head: a command, or a program."""

    def add_target(self, directory: Path, target_dir: Path) -> None:  # noqa: B027 (most have nothing to add)
        """Put into the directory what the engine wants there of the target: nothing, for servers that load both."""

    def notes(self) -> list[str]:
        """How what is served differs from what was measured, and what else its user must know."""
        return []

    def llama_config(self, dtype: str) -> dict[str, Any]:
        """`config.json` of a Llama of one layer, with the head's sizes and the target's vocabulary, RoPE and context."""
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.dims.hidden_size,
            "intermediate_size": self.dims.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.dims.num_attention_heads,
            "num_key_value_heads": self.dims.num_key_value_heads,
            "head_dim": self.dims.head_dim,
            "max_position_embeddings": self.target.max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": self.target.rms_norm_eps,
            "rope_parameters": head_rope_parameters(self.target),
            # Whatever the target does: a head holds no embeddings of its own, to which an lm_head could be tied.
            "tie_word_embeddings": False,
            "dtype": dtype,
        }


def rename(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Each tensor under the name that `names` gives it; those that it does not name keep theirs."""
    return {names.get(name, name): tensor for name, tensor in tensors.items()}
