"""Writes GGUF files of tiny targets, as llama.cpp's converter does, and damages them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.numpy import load_file
from transformers import AutoConfig, PreTrainedConfig

from tests.conftest import GENERATION_TEMPLATE, make_tokenizer

Q8, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MERGED = "\u0100\u0101"
"""The bytes 0 and 1, which no test writes, as one token instead of `<system>`. A GGUF file must have a merge."""


def architecture_of(config: PreTrainedConfig) -> str:
    return config.model_type.removesuffix("_text")


def settings_of(target_dir: Path) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's converter writes for a target, its architecture left out."""
    config = AutoConfig.from_pretrained(target_dir)
    name, rope = architecture_of(config), config.rope_parameters
    window = {f"{name}.attention.sliding_window": config.sliding_window} if name == "gemma3" else {}
    return {
        **window,
        "general.type": "model",
        f"{name}.vocab_size": config.vocab_size,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        f"{name}.rope.dimension_count": config.head_dim,
        **tokenizer_settings(config.eos_token_id),
    }


def tokenizer_settings(eos_token_id: int) -> dict[str, Any]:
    """Returns the metadata of the tests' tokenizer."""
    tokens = make_tokenizer().convert_ids_to_tokens(list(range(260)))
    tokens[257] = MERGED
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL if len(text) < 3 else CONTROL for text in tokens],
        "tokenizer.ggml.merges": [" ".join(MERGED)],
        "tokenizer.ggml.eos_token_id": eos_token_id,
        "tokenizer.chat_template": GENERATION_TEMPLATE,
    }


PIECES = [*"\u2581abcdehilot<>", *["he", "ll", "hell", "▁a", "ab", "ba", "▁t", "▁th", "▁the", "to", "lo"]]
"""Joined from the first to the last; `hell` before `lo`, so that `hello` is `hell` and `o`."""


def sentencepiece_settings(**changed: Any) -> dict[str, Any]:
    """Returns the metadata of a tokenizer of SentencePiece with 300 tokens, after changes to keys without their prefix.

    Llama's puts a space before a text; Gemma's has tokens for runs of spaces and for tags instead.
    """
    kinds = {"<unk>": UNKNOWN, **dict.fromkeys(("<s>", "</s>", "<turn>"), CONTROL)}
    kinds |= {"  ": USER_DEFINED, "<b>": USER_DEFINED, **{f"<0x{byte:02X}>": BYTE for byte in range(256)}}
    kinds |= dict.fromkeys(PIECES, NORMAL)
    kinds |= {f"<unused{i}>": CONTROL for i in range(300 - len(kinds))}
    scores = [float(-PIECES.index(text)) if text in PIECES else -1000.0 for text in kinds]
    settings = {"model": "llama", "pre": "default", "tokens": [*kinds], "token_type": [*kinds.values()], "merges": None}
    settings |= {"scores": scores, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changed}
    return {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


def tensors_of(target_dir: Path) -> dict[str, np.ndarray]:
    """Returns the target's tensors with their names in GGUF, and in llama.cpp's order of rows."""
    config = AutoConfig.from_pretrained(target_dir)
    names = get_tensor_name_map(MODEL_ARCH[architecture_of(config).upper()], config.num_hidden_layers)
    tensors = {}
    for name, weights in load_file(target_dir / "model.safetensors").items():
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = weights.reshape(heads, 2, -1, weights.shape[-1])
            weights = halves.swapaxes(1, 2).reshape(weights.shape)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            weights = weights + 1
        tensors[str(names.get_name(name, (".weight", ".bias")))] = weights
    return tensors


def write_gguf(
    path: Path,
    target_dir: Path,
    kind: GGMLQuantizationType = Q8,
    settings: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a target as a GGUF file with quantised matrices, after changes to its content; None removes."""
    metadata = {**settings_of(target_dir), **settings}
    architecture = architecture_of(AutoConfig.from_pretrained(target_dir))
    writer = GGUFWriter(path, metadata.pop("general.architecture", architecture))
    for key, value in metadata.items():
        if value is not None:
            kind_of_value = GGUFValueType.UINT32 if type(value) is int and value >= 0 else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind_of_value)
    for name, weights in {**tensors_of(target_dir), **tensors}.items():
        if weights is not None:
            is_matrix = weights.ndim == 2
            writer.add_tensor(name, quantize(weights, kind if is_matrix else F32), raw_dtype=kind if is_matrix else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
