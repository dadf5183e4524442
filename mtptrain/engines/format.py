"""The base class of export formats: names and layout of tensors, `config.json`, and the launch command."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PreTrainedConfig

from mtptrain.engines.limits import captured_layers
from mtptrain.heads.base import Tensors
from mtptrain.heads.layers import HeadDims, head_dims
from mtptrain.settings.heads import HeadConfig, LayerConfig
from mtptrain.target.families import norm_eps
from mtptrain.utils.files import save_tensors, write_json

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
"""Names of the tensors in a decoder layer, which are the same in the engines and in all heads with such a layer."""


class Format(ABC):
    """Defines how one kind of head is exported for one engine and a target."""

    architecture: str
    """The engine's model class, as named in `config.json`."""
    method: str
    """The engine's name for this drafting method."""
    speculative_settings: dict[str, object] = {}  # noqa: RUF012 (never changed)
    """Settings of vLLM's `--speculative-config` besides method, model and number of tokens."""
    target_gguf: Path | None = None
    """The target's GGUF file, if a setting names one."""
    is_quantised = False
    """Whether matrices are written as q8_0, instead of in their own dtype."""
    has_config_json = True
    """Whether the engine reads settings from `config.json`."""
    holds_target = False
    """Whether vLLM serves the directory alone, as a whole checkpoint that includes the target."""
    weights_name = "model.safetensors"
    """Name of the file with the head's tensors."""
    names: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """The engine's name for each of the head's tensors. Tensors that are not listed keep their names."""
    added: tuple[str, ...] = ()
    """The engine's name for each tensor that its file has besides those of the head."""

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        """Prefer `format_for`, which refuses heads that the engine cannot serve."""
        self.head = head
        self.target = target

    @classmethod
    def for_target(cls, head: HeadConfig, target: PreTrainedConfig) -> "Format":
        """Returns the format for a target. An engine may have several classes for a head."""
        return cls(head, target)

    def check(self) -> None:  # noqa: B027 (most need nothing)
        """Raises UserError if something is missing that the export needs besides the head and the target."""

    @cached_property
    def dims(self) -> HeadDims:
        """Sizes of the head's decoder layer. Heads without one do not have them."""
        assert isinstance(self.head, LayerConfig)
        return head_dims(self.head, self.target)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target that the head reads: id k is the stream after k decoder layers."""
        return captured_layers(self.head, self.target)

    def tensors(self, state: Tensors) -> Tensors:
        """Returns the engine's tensors from the head's `state_dict`."""
        return {self.names.get(name, name): tensor for name, tensor in state.items()}

    def state(self, tensors: Tensors) -> Tensors:
        """Returns the head's `state_dict` from the engine's tensors."""
        ours = {new: old for old, new in self.names.items()}
        return {ours.get(name, name): tensor for name, tensor in tensors.items() if name not in self.added}

    def rounded(self, state: Tensors) -> Tensors:
        """Returns the head's `state_dict` as it is after writing and reading."""
        return self.state(self.tensors(state))

    def config_json(self, dtype: str) -> dict[str, Any]:
        """Returns the contents of `config.json` for tensors of this dtype."""
        return self.llama_config(dtype)

    def write(self, directory: Path, tensors: Tensors) -> None:
        dtype = next(str(each.dtype).removeprefix("torch.") for each in tensors.values() if each.is_floating_point())
        write_json(directory / "config.json", self.config_json(dtype))
        save_tensors(directory / self.weights_name, tensors)

    def read(self, directory: Path) -> Tensors:
        return load_file(directory / self.weights_name)

    def target_name(self, name_for_engines: str) -> str:
        return name_for_engines

    @abstractmethod
    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        """Returns the command, or the Python program, that serves the target with the head."""

    def add_target(self, directory: Path, target_dir: Path) -> None:  # noqa: B027 (most have nothing to add)
        """Add the target's files that the engine needs in the same directory as the head, if any."""

    def notes(self) -> list[str]:
        """Returns notes for users, such as how serving differs from the measurement."""
        return []

    def llama_config(self, dtype: str) -> dict[str, Any]:
        """Returns `config.json` for a one-layer Llama with the head's sizes and RoPE and the target's vocabulary."""
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
            "rms_norm_eps": norm_eps(self.target),
            "rope_parameters": dict(self.dims.rope),
            # False even if the target ties them, because the head has no embeddings to tie an lm_head to.
            "tie_word_embeddings": False,
            "dtype": dtype,
        }
