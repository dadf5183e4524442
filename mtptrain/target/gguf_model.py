"""Translates a GGUF file's settings and tensor names into those of transformers.

Both are read by a whitelist. transformers has a reader of its own, but it ignores what it does not know, such as
`rope_freqs.weight` and `rope.scaling`, and a head would then be trained for another model than the one that is served.
"""

import math
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mtptrain.target.gguf_header import CHOOSE_ANOTHER, DOWNLOAD_AGAIN, GGUFHeader, read_header
from mtptrain.utils.errors import UserError, error_summary

Rows = TypeVar("Rows", np.ndarray, torch.Tensor)

INTERLEAVED = {"llama": ("attn_q", "attn_k"), "qwen2": (), "qwen3": (), "eagle3": ("attn_q", "attn_k"), "dflash": ()}
"""Modules of each architecture whose outputs llama.cpp rotates in pairs of neighbours: their rows are in another order
than in transformers."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Names that llama.cpp and transformers share. Mistral's files are of the architecture llama."""

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
OTHER_KEYS = (
    *("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("expert_count", "expert_used_count"),
)
KINDS = {
    "rope.scaling.type": (str, "a text"),
    "rope.scaling.finetuned": (int, "true or false"),
    **dict.fromkeys(("expert_count", "expert_used_count"), (int, "0")),
}
"""The class of each setting that need not be a number above 0, and what it must be."""
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings that Llama 3.1, 3.2 and 3.3 share. They differ in `factor`."""

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_config(header: GGUFHeader) -> PreTrainedConfig:
    """Returns the config of the model that a GGUF file holds.

    Raises:
        UserError: the file is not a whole model, its architecture is not supported, or a setting is missing, not
            understood, or not one that transformers implements.
    """
    path, architecture = header.path, _architecture(header)
    prefix = architecture + "."
    keys = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if unknown := sorted(keys.keys() - {*SIZES, *OTHER_KEYS}):
        raise UserError(
            f"{path}: settings must be among those that this program can translate, but {prefix}{unknown[0]} is not; "
            f"{CHOOSE_ANOTHER}"
        )
    if missing := [key for key in (*SIZES, "attention.layer_norm_rms_epsilon") if key not in keys]:
        raise UserError(f"{path}: must have the setting {prefix}{missing[0]}, but does not; {DOWNLOAD_AGAIN}")
    for key, value in keys.items():
        if not _is_possible(key, value):
            kind = KINDS[key][1] if key in KINDS else "a number above 0"
            raise UserError(f"{path}: {prefix}{key} must be {kind}, but is {value!r}; {CHOOSE_ANOTHER}")
    heads = keys["attention.head_count"]
    head_dim = keys.get("attention.key_length", keys["embedding_length"] // heads)
    for key, only in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("expert_used_count", 0),
    ):
        if keys.get(key, only) != only:
            raise UserError(f"{path}: {prefix}{key} must be {only}, but is {keys[key]!r}; {CHOOSE_ANOTHER}")
    settings = {
        "vocab_size": keys.get("vocab_size", len(header.metadata.get("tokenizer.ggml.tokens", ()))),
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": _rope(header, prefix, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32",
    }
    try:
        return AutoConfig.for_model(architecture, **settings, **{name: keys[key] for key, name in SIZES.items()})
    except Exception as error:  # the config's classes check their fields in their own ways
        raise _unbuildable(path, error) from error


def _is_possible(key: str, value: Any) -> bool:
    if key in KINDS:
        return isinstance(value, KINDS[key][0])
    return isinstance(value, int if key in SIZES else int | float) and 0 < value < math.inf


def _architecture(header: GGUFHeader) -> str:
    path, metadata = header.path, header.metadata
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UserError(f"{path}: general.type must be 'model', but is {kind!r}; give the file of the model itself")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{path}: must be a whole model in one file, but is one of {metadata['split.count']} parts; merge them "
            "with llama.cpp's `llama-gguf-split --merge`"
        )
    if (architecture := metadata.get("general.architecture")) not in ARCHITECTURES:
        raise UserError(
            f"{path}: general.architecture must be one of {', '.join(ARCHITECTURES)}, but is {architecture!r}; "
            f"{CHOOSE_ANOTHER}"
        )
    return str(architecture)


def _rope(header: GGUFHeader, prefix: str, keys: dict[str, Any], head_dim: int) -> dict[str, Any]:
    path, theta = header.path, float(keys.get("rope.freq_base", 10000.0))
    scaling = keys.get("rope.scaling.type", "linear")  # llama.cpp's default; without a factor, it changes nothing
    if scaling not in ("none", "linear"):
        raise UserError(
            f"{path}: {prefix}rope.scaling.type must be none or linear, but is {scaling!r}; {CHOOSE_ANOTHER}"
        )
    factor = keys.get("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    parameters: dict[str, Any] = {"rope_type": "default"}
    if factor != 1.0:
        parameters = {"rope_type": "linear", "factor": factor}
    elif prefix == "llama." and ROPE_FACTORS in header.tensors:
        factors = header.dequantised(ROPE_FACTORS)
        parameters = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
        expected = llama3_factors(parameters["factor"], theta, head_dim)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise UserError(
                f"{path}: {ROPE_FACTORS} must hold the RoPE factors of Llama 3.1 or later, but holds others; "
                f"{CHOOSE_ANOTHER}"
            )
    return {**parameters, "rope_theta": theta}


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """Returns the factor [head_dim / 2] by which Llama 3.1's RoPE lengthens each wave, as llama.cpp stores it."""
    low, high, context = (float(LLAMA3_ROPE[name]) for name in LLAMA3_ROPE)
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((context / waves - low) / (high - low)).clip(0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def require_same_sizes(path: Path, target: PreTrainedConfig) -> None:
    """Refuse a GGUF file whose sizes are not the target's.

    Raises:
        UserError: it does not exist, is damaged, or is that of another model.
    """
    if not path.is_file():
        raise UserError(f"target.gguf: must be an existing GGUF file, but {path} does not exist; correct the path")
    metadata = read_header(path).metadata
    architecture = metadata.get("general.architecture")
    theirs = {name: metadata.get(f"{architecture}.{name}") for name in ("embedding_length", "block_count")}
    theirs["number of tokens"] = len(metadata.get("tokenizer.ggml.tokens", ()))
    ours = dict(zip(theirs, (target.hidden_size, target.num_hidden_layers, target.vocab_size), strict=True))
    for name, size in ours.items():
        if theirs[name] != size:
            raise UserError(
                f"target.gguf: must be the target as a GGUF file, whose {name} is {size}, but in {path} it is "
                f"{theirs[name]}; convert the model of target.path with llama.cpp's convert_hf_to_gguf.py"
            )


def tensor_names(header: GGUFHeader, config: PreTrainedConfig) -> dict[str, str]:
    """Returns the name in transformers of each tensor of the file, and sets `config.architectures`.

    Every tensor of the model is among them.

    Raises:
        UserError: a tensor is missing, superfluous, or has another shape than the settings say.
    """
    path = header.path
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # with wrong settings, the model's code may raise anything
        raise _unbuildable(path, error) from error
    config.architectures = [type(model).__name__]
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    in_config = ROPE_FACTORS if config.rope_parameters["rope_type"] == "llama3" else None
    names = {name: _translated(name) for name in header.tensors if name != in_config}
    for name, translated in names.items():
        shape = header.tensors[name].shape
        if translated not in expected:
            raise UserError(
                f"{path}: tensors must be those of a {config.model_type} model with {config.num_hidden_layers} layers, "
                f"but {name} is not; {CHOOSE_ANOTHER}"
            )
        if shape != expected[translated]:
            raise UserError(
                f"{path}: {name} must have the shape {expected[translated]} that the file's settings describe, but has "
                f"{shape}; {DOWNLOAD_AGAIN}"
            )
    if missing := sorted(expected.keys() - set(names.values())):
        raise UserError(f"{path}: must hold the tensor of {missing[0]}, but does not; {DOWNLOAD_AGAIN}")
    return names


def _translated(name: str) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    module, _, parameter = name[layer.end() if layer else 0 :].rpartition(".")
    return (f"model.layers.{layer[1]}." if layer else "") + f"{MODULES.get(module, module)}.{parameter}"


def _unbuildable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: settings must describe a model that transformers can build, but transformers reports "
        f"{error_summary(error)}; {DOWNLOAD_AGAIN}"
    )


def model_tensor(header: GGUFHeader, name: str, config: PreTrainedConfig) -> np.ndarray:
    """Returns a tensor in fp32 and in the layout of transformers."""
    weights = header.dequantised(name)
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module not in INTERLEAVED[config.model_type]:
        return weights
    heads = config.num_attention_heads if module == "attn_q" else config.num_key_value_heads
    return uninterleaved(weights, heads)


def interleaved(rows: Rows, num_heads: int) -> Rows:
    """Returns the rows of a projection in llama.cpp's order, where the two outputs of a rotated pair are neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def uninterleaved(rows: Rows, num_heads: int) -> Rows:
    """Returns rows that are in llama.cpp's order in that of transformers, where halves of a head are rotated."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
