"""Reads and checks targets' configs, and says what heads take from them: RoPE, head dim, epsilon, ends of sequence.

No list says which families work: `mtptrain.target.form` finds out how a model is built.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from mtptrain.target.form import find_form
from mtptrain.target.generation import NO_EFFECT, read_generation
from mtptrain.target.hub import DOWNLOAD_AGAIN, MODEL_OPT_QUANTISATION
from mtptrain.target.mimo import MiMoConfig, is_mimo_json
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import read_json

NEEDED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Settings without which a config is not that of a transformer; pure Mamba models lack some."""

SIZES = {
    **dict.fromkeys((*NEEDED_SIZES, "num_key_value_heads", "head_dim"), (1, 2**31)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (1, 2**31)),
    "num_hidden_layers": (1, 10_000),  # building a model with more to look at it would not end
    "num_nextn_predict_layers": (0, 10_000),
}
"""The least and the greatest value of each size that a config may have; some differ by layer."""

PLAIN_TEXT_MODELS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Language models without a class of their own in transformers, and families that compute the same for text, where
positions have one axis."""

TEXT_MODEL_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Patterns of tensor names in image+text checkpoints, and what stands for them in the language model alone."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""RoPE types whose rotation of a position does not depend on the length of the text."""

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_OF_THE_TARGET = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""RoPE settings that heads do not share: they rotate whole attention heads, by one position for each token."""


def read_target_config(target_dir: Path) -> PreTrainedConfig:
    config, path, described = _read_config(target_dir), target_dir / "config.json", target_dir / MODEL_OPT_QUANTISATION
    if getattr(config, "quantization_config", None) is None and described.is_file():
        quantisation = read_json(described, DOWNLOAD_AGAIN).get("quantization") or {}
        if quantisation.get("quant_algo"):  # without one, only the engine's cache is quantised
            config.quantization_config = {"quant_method": "modelopt", **quantisation}
    if getattr(config, "is_heterogeneous", False):
        config.allow_global_per_layer_attribute_access = True  # plans read head_dim, which differs by layer in Gemma 4
    family = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"target.path: transformers must have a language model for the target's family, but has none for "
            f"{family!r} in {path}; choose another target"
        )
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # that is for images
        raise UserError(
            f"target.path: a token must not attend to later tokens, but use_bidirectional_attention is set in {path}; "
            "choose another target"
        )
    _check_sizes(config, path)
    check_rope(config)
    read_generation(target_dir, config)
    if _ignores_windows(config):
        raise UserError(
            f"target.path: transformers must implement the sliding windows of {family!r}, but ignores "
            f"those in {path}, which engines apply; choose another target, or, if this one was trained without them, "
            "remove sliding_window and layer_types from a copy of this file"
        )
    return config


def _text_config(config: PreTrainedConfig, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the config of the language model inside an image+text checkpoint, or a language model's own config."""
    if not hasattr(config, "text_config"):
        return config
    text = config.get_text_config(decoder=True)
    if text.model_type in PLAIN_TEXT_MODELS:
        left_out = ("model_type", "architectures", "layer_types", "dtype")
        own = {name: value for name, value in text.to_dict().items() if name not in left_out}
        rope = {name: value for name, value in text.rope_parameters.items() if name not in ROPE_OF_THE_TARGET}
        text = AutoConfig.for_model(PLAIN_TEXT_MODELS[text.model_type], **own | {"rope_parameters": rope})
    text.name_or_path = config.name_or_path or ""
    of_whole = {"quantization_config", "tie_word_embeddings", *GenerationConfig().to_dict()} - NO_EFFECT
    for name in (each for each in settings if each in of_whole and getattr(config, each, None) is not None):
        setattr(text, name, getattr(config, name))
    return text


def _read_config(target_dir: Path) -> PreTrainedConfig:
    path, adapter = target_dir / "config.json", target_dir / "adapter_config.json"
    if adapter.is_file():
        raise UserError(
            f"{adapter}: must not exist, because transformers may add its adapter to the weights, and an engine may "
            "not, but does; merge the adapter into the weights, or move this file away"
        )
    settings = read_json(path, DOWNLOAD_AGAIN)
    if not isinstance(model_type := settings.get("model_type"), str):
        raise UserError(f"{path}: model_type must name a family of models, but is {model_type!r}; {DOWNLOAD_AGAIN}")
    for name in ("attn_implementation", "experts_implementation"):
        for value in (settings.get(name), settings.get(f"_{name}")):
            if value is not None and "/" in str(value):  # a repository of kernels
                raise UserError(
                    f"{path}: {name} must be unset, because mtptrain never runs code that a target names, but is "
                    f"{value!r}; remove it"
                )
    # transformers itself refuses a model's own code, by an error.
    advice = "choose another target" if settings.get("auto_map") else DOWNLOAD_AGAIN
    with refusing(f"{path}: must be readable by transformers", advice):
        if is_mimo_json(settings):
            return MiMoConfig.from_dict(settings | {"model_type": MiMoConfig.model_type})
        return _text_config(AutoConfig.from_pretrained(target_dir, trust_remote_code=False), settings)


def _check_sizes(config: PreTrainedConfig, path: Path) -> None:
    missing = [name for name in NEEDED_SIZES if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise UserError(
            f"target.path: the target must have the settings {', '.join(NEEDED_SIZES)}, but a {config.model_type} has "
            f"no {', '.join(missing)} in {path}; choose another target"
        )
    for name, (least, most) in SIZES.items():
        size = getattr(config, name, None)
        sizes = size if isinstance(size, list | tuple) else [] if size is None else [size]
        if not all(isinstance(each, int) and least <= each <= most for each in sizes):
            raise UserError(
                f"{path}: {name} must be a whole number from {least} to {most}, but is {size!r}; {DOWNLOAD_AGAIN}"
            )
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    if heads % shared:
        raise UserError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, but they are {heads} and "
            f"{shared}; {DOWNLOAD_AGAIN}"
        )


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the size of the sliding window in tokens, including the query itself; None if no layer has one."""
    return next((mask.window for mask in find_form(config).masks if mask and mask.window), None)


def has_window_in_all_layers(config: PreTrainedConfig) -> bool:
    return all(mask and mask.window for mask in find_form(config).masks)


def _ignores_windows(config: PreTrainedConfig) -> bool:
    """Returns whether the config sets windows that the family's code in transformers does not implement."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types:
        return "sliding_attention" in types and (window is None or sliding_window(config) is None)
    is_wanted = getattr(config, "use_sliding_window", True) and window is not None
    return bool(is_wanted and window < config.max_position_embeddings and sliding_window(config) is None)


def mlp_size(config: PreTrainedConfig) -> int:
    """Returns the intermediate size of a head's MLP: the target's, or 4 H if all its layers are mixtures."""
    return largest(config, "intermediate_size") or 4 * int(config.hidden_size)


def largest(config: PreTrainedConfig, *names: str) -> int:
    """Returns the first of these settings that the config has, its largest value if it differs by layer, or 0."""
    values = [value for name in names if (value := getattr(config, name, None))]
    return int(max(values[0]) if isinstance(values[0], list | tuple) else values[0]) if values else 0


def key_heads(config: PreTrainedConfig) -> int:
    """Returns the number of key/value heads; some families have no setting for it, and one for each query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def routed_experts(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns how many routed experts of a layer a token uses, and how many there are; 1 and 1 without experts."""
    number = largest(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    used = largest(
        config, "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "experts_per_token"
    )
    return (min(used or number, number), number) if number else (1, 1)


def norm_eps(config: PreTrainedConfig) -> float:
    """Returns the epsilon of a target's norms, which heads share."""
    return find_form(config).norm_eps


def head_dim(config: PreTrainedConfig) -> int:
    """Returns the size of an attention head. Some families, such as Qwen2, have no setting for it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_rope_parameters(target_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the RoPE of a head for a target, as one flat dict with `rope_type` and `rope_theta`.

    It is that of layers with full attention, without `ROPE_OF_THE_TARGET`: heads, and engines, rotate whole attention
    heads. For a target without RoPE it is `DEFAULT_ROPE`.
    """
    parameters = _full_attention_rope(target_config)
    shared = {name: value for name, value in parameters.items() if name not in ROPE_OF_THE_TARGET}
    return shared if shared["rope_type"] != "proportional" else shared | {"rope_type": "default"}


def _full_attention_rope(config: PreTrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    sections = [value for value in parameters.values() if isinstance(value, dict)]
    parameters = parameters.get("full_attention", sections[0] if sections else parameters)
    return {**parameters, **{name: value for name, value in DEFAULT_ROPE.items() if name not in parameters}}


def check_rope(config: PreTrainedConfig) -> None:
    """Refuse RoPE that depends on the length of the text, or that transformers computes otherwise than engines."""
    rope_parameters = _full_attention_rope(config)
    rope_type, name = rope_parameters["rope_type"], "partial_rotary_factor"
    if rope_type not in STATIC_ROPE_TYPES:
        raise UserError(
            f"target.path: the target's RoPE must be one of {', '.join(STATIC_ROPE_TYPES)}, but is {rope_type!r}, "
            "which is unknown, or changes with the length of the text; choose another target"
        )
    share = rope_parameters.get(name) or getattr(config, name, None) or 1
    if share != 1 and rope_type != "proportional" and find_form(config).rotary_dim == head_dim(config):
        raise UserError(
            f"target.path: the target's {name} must be 1, because transformers rotates whole attention "
            f"heads in a {config.model_type} and engines would not, but is {share}; choose another target"
        )
