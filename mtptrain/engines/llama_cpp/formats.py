"""Export formats for llama.cpp b11434: a GGUF file with the head, which `llama-server` loads beside the target's own.

Sources: src/models/eagle3.cpp and dflash.cpp, common/speculative.cpp, and conversion/llama.py and qwen.py.
"""

import shlex
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from transformers import PreTrainedConfig

from mtptrain.data.draft_vocab import offsets
from mtptrain.engines.format import LAYER_PARTS, Format
from mtptrain.engines.llama_cpp.server import HEAD_FILE, HOST_SAMPLING, draft_arguments
from mtptrain.heads.base import Tensors
from mtptrain.heads.dflash import block_size, layer_kinds
from mtptrain.heads.dflash2 import published_settings
from mtptrain.heads.draft_model import model_config
from mtptrain.heads.layers import HeadDims, Rope
from mtptrain.settings.heads import (
    Dflash2Config,
    DflashConfig,
    DraftModelConfig,
    DsparkConfig,
    Eagle3Config,
    HeadConfig,
    mask_token_id,
)
from mtptrain.target.families import head_dim, head_rope_parameters, key_heads, mlp_size, norm_eps
from mtptrain.target.gguf import (
    INTERLEAVED,
    MODULES,
    ROPE_FACTORS,
    interleaved,
    read_header,
    require_same_sizes,
    uninterleaved,
)
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import naming

KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
"""llama.cpp's name of each dtype of matrices. It expects all vectors in fp32."""
NAMES = {module: name for name, module in MODULES.items()}
"""Name in a GGUF file of each module of a language model."""
TARGET_GGUF = "TARGET.gguf"
"""Stands in commands for the target's file where no setting names it."""
D2T = "d2t"
CORRECTION = ("markov_w1.weight", "markov_w2.weight")
LAYER = tuple(part.removesuffix(".weight") for part in LAYER_PARTS)
OUTSIDE_LAYERS = {"model.embed_tokens", "model.norm", "lm_head"}
ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's name of each family of draft models."""


def layer_names(modules: Iterable[str], ours: str, theirs: str) -> dict[str, str]:
    """Returns the name in the file of each weight and bias of a decoder layer, by the head's name of it."""
    return {
        f"{ours}{module}.{part}": f"{theirs}{NAMES[module]}.{part}" for module in modules for part in ("weight", "bias")
    }


class GgufFormat(Format):
    """Writes a head as a GGUF file. Its layer ids are ours: id k is the stream after k decoder layers."""

    weights_name = HEAD_FILE
    has_config_json = False
    num_layers = 1
    added: tuple[str, ...] = (ROPE_FACTORS,)

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.config = target
        """The config with the vocabulary, the context, the RoPE and the epsilon of the head's layers."""

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        for name in filter(self._is_interleaved, tensors):
            tensors[name] = interleaved(tensors[name], self._num_heads(name))
        if D2T in tensors:  # the ids themselves, not offsets
            tensors[D2T] = tensors[D2T] + torch.arange(len(tensors[D2T]), device=tensors[D2T].device)
        factors = self._rope.factors()
        return tensors if torch.allclose(factors, torch.ones(())) else tensors | {ROPE_FACTORS: factors}

    def state(self, tensors: Tensors) -> Tensors:
        tensors = dict(tensors)
        for name in filter(self._is_interleaved, tensors):
            tensors[name] = uninterleaved(tensors[name], self._num_heads(name))
        if D2T in tensors:
            tensors[D2T] = offsets(tensors[D2T])
        return super().state(tensors)

    def write(self, directory: Path, tensors: Tensors) -> None:
        """Write the file. `_ggml_type` chooses the type of each tensor."""
        writer = GGUFWriter(directory / self.weights_name, self.architecture)
        for key, value in self.config_json("").items():
            is_size = type(value) is int and value >= 0
            writer.add_key_value(key, value, GGUFValueType.UINT32 if is_size else GGUFValueType.get_type(value))
        for name, tensor in tensors.items():
            if name == D2T:
                writer.add_tensor(name, tensor.numpy())
            else:
                kind = self._ggml_type(name, tensor)
                writer.add_tensor(name, quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        with naming(directory / self.weights_name):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()

    def read(self, directory: Path) -> Tensors:
        found = {}
        for tensor in GGUFReader(directory / self.weights_name).tensors:
            values = tensor.data if tensor.name == D2T else dequantize(tensor.data, tensor.tensor_type)
            found[tensor.name] = torch.from_numpy(np.array(values))
        return found

    def rounded(self, state: Tensors) -> Tensors:
        tensors = self.tensors(state)
        for name, tensor in tensors.items():
            if name != D2T:
                kind = self._ggml_type(name, tensor)
                tensors[name] = torch.from_numpy(dequantize(quantize(tensor.float().numpy(), kind), kind))
        return self.state(tensors)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """Returns the metadata of the file, which it has instead of a `config.json`."""
        dims, config = self.dims, self.config
        settings = {
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "block_count": self.num_layers,
            "embedding_length": dims.hidden_size,
            "feed_forward_length": dims.intermediate_size,
            "attention.head_count": dims.num_attention_heads,
            "attention.head_count_kv": dims.num_key_value_heads,
            "attention.key_length": dims.head_dim,
            "attention.value_length": dims.head_dim,
            "attention.layer_norm_rms_epsilon": norm_eps(config),
            "rope.dimension_count": dims.head_dim,
            "rope.freq_base": self._rope.theta,
            "rope.scaling.attn_factor": self._rope.scaling,
            **self.method_settings(),
        }
        named = {f"{self.architecture}.{key}": value for key, value in settings.items()}
        return {"general.type": "model", **named, **self.tokenizer()}

    def method_settings(self) -> dict[str, Any]:
        """Returns the metadata of the drafting method, without the architecture before each key."""
        return {}

    def tokenizer(self) -> dict[str, Any]:
        """Returns the metadata of the tokenizer."""
        return {"tokenizer.ggml.model": "none"}

    def target_name(self, name_for_engines: str) -> str:
        return TARGET_GGUF if self.target_gguf is None else str(self.target_gguf)

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        words = ["llama-server", "-m", target, "-md", str(directory / self.weights_name)]
        return shlex.join([*words, *draft_arguments(self.method, num_speculative_tokens)])

    def notes(self) -> list[str]:
        notes = [
            "Without `--spec-type`, llama.cpp loads this file and silently drafts nothing. Without "
            f"`{HOST_SAMPLING}`, it drafts wrong tokens whenever it answers two requests at once: answers stay right, "
            "but few drafts are accepted. With `-ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off`, and target and head in "
            "float32, it accepts exactly the drafts that mtptrain does; its usual caches in f16 and quantised weights "
            "round differently."
        ]
        if self.is_quantised:
            notes.append("The matrices here are rounded to 8 bits; any acceptance above was measured before that.")
        if self.target_gguf is None:
            notes.append(
                f"`{TARGET_GGUF}` is the target, converted with llama.cpp's own program: `python "
                f"convert_hf_to_gguf.py DIRECTORY_OF_THE_TARGET --outfile {TARGET_GGUF}`."
            )
        return notes

    def _ggml_type(self, name: str, tensor: torch.Tensor) -> GGMLQuantizationType:
        """Returns the type in which a tensor is written. Blocks of q8_0 are rows of 32 values."""
        if tensor.ndim == 1 or not name.endswith(".weight"):
            return KINDS[torch.float32]
        is_whole = tensor.shape[-1] % 32 == 0
        return GGMLQuantizationType.Q8_0 if self.is_quantised and is_whole else KINDS[tensor.dtype]

    @property
    def _rope(self) -> Rope:
        return Rope(self.dims.head_dim, self.dims.rope, self.config.max_position_embeddings)

    def _is_interleaved(self, name: str) -> bool:
        return name.rpartition(".")[0].rpartition(".")[2] in INTERLEAVED.get(self.architecture, ())

    def _num_heads(self, name: str) -> int:
        return self.dims.num_attention_heads if ".attn_q." in name else self.dims.num_key_value_heads


class LlamaCppEagle3(GgufFormat):
    """Exports `eagle3`. llama.cpp feeds back the state before the final norm."""

    architecture = "eagle3"
    method = "draft-eagle3"
    names = {  # noqa: RUF012 (never changed)
        **layer_names(LAYER, "", "blk.0."),
        "hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "input_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    head: Eagle3Config

    def method_settings(self) -> dict[str, Any]:
        return {
            "target_layers": list(self.layers),
            "target_hidden_size": self.target.hidden_size,
            "norm_before_fc": self.head.norm_before_fc,
            "norm_before_residual": self.head.norm_before_residual,
        }


class WithTokenizer(GgufFormat):
    """A file with the tokenizer of the target's file."""

    def check(self) -> None:
        """Check the target's GGUF file. Raises UserError if it is left out, missing, damaged, or of another model."""
        if self.target_gguf is None:
            raise UserError(
                f"target.gguf: must be the target's GGUF file to export head {self.head.name} for llama_cpp, which "
                "needs its tokenizer, but is left out; convert the target with llama.cpp's convert_hf_to_gguf.py and "
                "set target.gguf=FILE"
            )
        require_same_sizes(self.target_gguf, self.target)

    def tokenizer(self) -> dict[str, Any]:
        assert self.target_gguf is not None
        metadata = read_header(self.target_gguf).metadata
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


class LlamaCppDflash(WithTokenizer):
    """Exports `dflash`, whose mask token llama.cpp looks up in the tokenizer.

    With `sample_from_anchor` it is exported as DSpark, the only method in which llama.cpp drafts with the newest token.
    DSpark corrects logits by the token before; that correction is written as 0.
    """

    architecture = "dflash"
    method = "draft-dflash"
    head: DflashConfig

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.num_layers = self.head.num_layers
        self.is_like_dspark = self.head.sample_from_anchor and self.method == LlamaCppDflash.method
        if self.is_like_dspark:
            self.method, self.added = LlamaCppDspark.method, (*self.added, *CORRECTION)
        self.names = {
            "hidden_norm.weight": "enc.output_norm.weight",
            "norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        for layer in range(self.num_layers):
            self.names |= layer_names(
                (*LAYER, "self_attn.q_norm", "self_attn.k_norm"), f"layers.{layer}.", f"blk.{layer}."
            )

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        if self.is_like_dspark:
            sizes = int(self.target.vocab_size), self.head.draft_vocab_size or int(self.target.vocab_size)
            like = tensors["fc.weight"]
            tensors |= {name: like.new_zeros(size, 1) for name, size in zip(CORRECTION, sizes, strict=True)}
        return tensors

    def method_settings(self) -> dict[str, Any]:
        layers, kinds = list(self.layers), layer_kinds(self.head)
        settings: dict[str, Any] = {"block_size": block_size(self.head), "target_layers": layers}
        if self.is_like_dspark:
            settings |= {"sample_from_anchor": True, "has_confidence_head": False}
        if self.head.sliding_window is not None:
            settings["attention.sliding_window"] = self.head.sliding_window
            settings["attention.sliding_window_pattern"] = [kind.window is not None for kind in kinds]
        # llama.cpp has one value for all layers: see the limits.
        return settings | {"attention.causal": kinds[0].is_causal}

    def tokenizer(self) -> dict[str, Any]:
        return super().tokenizer() | {
            "tokenizer.ggml.mask_token_id": mask_token_id(self.head.mask_token_id, self.target.vocab_size)
        }


class LlamaCppDspark(LlamaCppDflash):
    """Exports `dspark`."""

    method = "draft-dspark"
    head: DsparkConfig

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.names |= {
            **{f"markov_head.{name}": name for name in CORRECTION},
            **{f"confidence_head.proj.{part}": f"conf_proj.{part}" for part in ("weight", "bias")},
        }

    def method_settings(self) -> dict[str, Any]:
        anchor = {"sample_from_anchor": self.head.sample_from_anchor, "has_confidence_head": True}
        return super().method_settings() | anchor


class LlamaCppDflash2(LlamaCppDflash):
    """Exports `dflash2`."""

    head: Dflash2Config

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.names |= {
            "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
            "candidate_selector.successor_codebook": "selector_successor.weight",
            "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
        }
        for layer in range(self.num_layers):
            for ours, theirs in (("attention", "attn"), ("mlp", "ffn")):
                conv, named = f"layers.{layer}.{ours}_conv", f"blk.{layer}.{theirs}_conv"
                self.names |= {f"{conv}.base_kernel": f"{named}_base"}
                self.names |= {f"{conv}.kernel_projection.weight": f"{named}_proj.weight"}

    def method_settings(self) -> dict[str, Any]:
        return super().method_settings() | published_settings(self.head)


class LlamaCppDraftModel(WithTokenizer):
    """Exports `draft_model` as a model of its own. llama.cpp compares its tokenizer with the target's."""

    method = "draft-simple"
    head: DraftModelConfig

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.config = model_config(self.head, target)
        self.architecture = ARCHITECTURE_OF[self.config.model_type]
        self.num_layers = self.config.num_hidden_layers
        self.names = {f"{module}.weight": f"{NAMES[module]}.weight" for module in OUTSIDE_LAYERS}
        for layer in range(self.num_layers):
            self.names |= layer_names(NAMES.keys() - OUTSIDE_LAYERS, f"model.layers.{layer}.", f"blk.{layer}.")

    @cached_property
    def dims(self) -> HeadDims:
        config = self.config
        sizes = config.hidden_size, config.num_attention_heads, key_heads(config), head_dim(config), mlp_size(config)
        return HeadDims(*sizes, head_rope_parameters(config))
