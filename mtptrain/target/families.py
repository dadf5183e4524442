"""Lists the supported model families, says how they differ (sliding windows, RoPE, norms), and checks configs."""

import math
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mtptrain.target.hub import DOWNLOAD_AGAIN
from mtptrain.target.mimo import MiMoConfig, is_mimo
from mtptrain.utils.errors import UserError, error_summary
from mtptrain.utils.files import read_json

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "deepseek_v2", "mimo")

FAMILIES_WITH_MTP = (
    *("deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "glm4_moe"),
    *("exaone_moe", "ernie4_5_moe", "mimo_v2_flash"),
)
"""Unsupported families whose checkpoints have MTP layers."""

OFFSET_NORM_MODEL_TYPES = ("gemma3_text",)
"""Families whose RMSNorm multiplies by 1 + weight, in fp32."""

WINDOW_IN_ALL_LAYERS = ("mistral", "qwen3_moe")
"""Families whose sliding window applies to every layer."""

WINDOW_BY_LAYER_TYPE = ("qwen2", "qwen3", "gemma3_text", "mimo")
"""Families whose `layer_types` say which layers have the sliding window."""

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
"""Settings that must be at least 1 if the config has them."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose rotation of a position does not depend on the length of the text."""


def read_target_config(target_dir: Path) -> PreTrainedConfig:
    """Returns the target's config.

    Raises:
        UserError: the model family or one of its settings is not supported, or one of the config files is damaged.
    """
    config, path = _read_config(target_dir), target_dir / "config.json"
    family = config.model_type
    if family not in SUPPORTED_MODEL_TYPES:
        text_family = getattr(getattr(config, "text_config", None), "model_type", None)
        is_usable = text_family in SUPPORTED_MODEL_TYPES
        mtp = ", so its own MTP layers cannot be trained or measured" if family in FAMILIES_WITH_MTP else ""
        raise UserError(
            f"target.path: the target's family must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, but is {family!r} in "
            f"{path}{mtp}; choose "
            + (f"its text model alone, a checkpoint with model_type {text_family!r}" if is_usable else "another target")
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UserError(
            f"target.path: a token must not attend to later tokens, but use_bidirectional_attention is set in {path}; "
            "choose another target"
        )
    check_rope(config)
    _check_sizes(config, path)
    generation_config = read_generation_config(target_dir)
    if generation_config is not None:
        _check_eos(generation_config, config.vocab_size, target_dir / "generation_config.json")
    if _ignores_windows(config):
        raise UserError(
            f"target.path: transformers must implement the sliding windows of {family!r}, but ignores "
            f"those in {path}, which engines apply; remove sliding_window and layer_types from this file, or choose "
            "another target"
        )
    return config


def _read_config(target_dir: Path) -> PreTrainedConfig:
    path, adapter = target_dir / "config.json", target_dir / "adapter_config.json"
    if adapter.is_file():
        raise UserError(
            f"{adapter}: must not exist, because transformers may add its adapter to the weights, and an engine may "
            "not, but does; merge the adapter into the weights, or move this file away"
        )
    settings = read_json(path, DOWNLOAD_AGAIN)
    if not isinstance(model_type := settings.get("model_type"), str):
        raise UserError(
            f"{path}: model_type must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, but is {model_type!r}; "
            f"{DOWNLOAD_AGAIN}"
        )
    _refuse_own_code(settings, path)
    try:
        if is_mimo(settings):
            return MiMoConfig.from_dict(settings | {"model_type": MiMoConfig.model_type})
        return AutoConfig.from_pretrained(target_dir, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{path}: must be readable by transformers, which reports {error_summary(error)}; {DOWNLOAD_AGAIN}"
        ) from error


def _refuse_own_code(settings: dict[str, Any], path: Path) -> None:
    """Raises UserError if a config can only be used with code from the checkpoint or from the hub.

    The code in `auto_map` of a family that transformers has is ignored.
    """
    model_type = settings["model_type"]
    if settings.get("auto_map") and model_type not in CONFIG_MAPPING and not is_mimo(settings):
        raise UserError(
            f"{path}: model_type must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, because mtptrain never runs a "
            f"target's own code, but is {model_type!r}, which auto_map looks for in {settings['auto_map']}; choose "
            "another target"
        )
    for name in ("attn_implementation", "experts_implementation"):
        for value in (settings.get(name), settings.get(f"_{name}")):
            if value is not None and "/" in str(value):  # a repository of kernels
                raise UserError(
                    f"{path}: {name} must be unset, because mtptrain never runs code that a target names, but is "
                    f"{value!r}; remove it"
                )


def _rope_thetas(config: PreTrainedConfig) -> list[Any]:
    """Returns every rope_theta of a config: a single one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sections = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return [section["rope_theta"] for section in sections if section.get("rope_theta") is not None]


def _check_sizes(config: PreTrainedConfig, path: Path) -> None:
    for theta in _rope_thetas(config):
        if not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise UserError(f"{path}: rope_theta must be a number above 0, but is {theta!r}; {DOWNLOAD_AGAIN}")
    for name in SIZES:
        size = getattr(config, name, None)
        if size is not None and size < 1:
            raise UserError(f"{path}: {name} must be at least 1, but is {size}; {DOWNLOAD_AGAIN}")
    num_mtp_layers = getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(num_mtp_layers, int | None):
        raise UserError(
            f"{path}: num_nextn_predict_layers must be a whole number, but is {num_mtp_layers!r}; {DOWNLOAD_AGAIN}"
        )
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    if heads % shared:
        raise UserError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, but they are {heads} and "
            f"{shared}; {DOWNLOAD_AGAIN}"
        )


def read_generation_config(target_dir: Path) -> GenerationConfig | None:
    """Returns the target's generation_config.json, or None if it has none."""
    has_file = (target_dir / "generation_config.json").is_file()
    if not has_file:
        return None
    read_json(path := target_dir / "generation_config.json", DOWNLOAD_AGAIN)
    try:
        return GenerationConfig.from_pretrained(target_dir)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: must be readable by transformers, which reports {error_summary(error)}; {DOWNLOAD_AGAIN}"
        ) from error


def _check_eos(source: GenerationConfig, vocab_size: int, path: Path) -> None:
    ids = source.eos_token_id
    for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if not (isinstance(token, int) and 0 <= token < vocab_size):
            raise UserError(
                f"{path}: eos_token_id must be token ids below vocab_size={vocab_size}, but is {ids!r}; "
                f"{DOWNLOAD_AGAIN}"
            )


def eos_token_ids(config: PreTrainedConfig, generation_config: GenerationConfig | None = None) -> tuple[int, ...]:
    """Returns the target's end-of-sequence tokens. Those of the generation config take precedence, as in engines."""
    for source in (generation_config, config):
        ids = None if source is None else source.eos_token_id
        if ids not in (None, []):
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the size of the sliding window in tokens, including the query itself; None if no layer has one."""
    is_used = config.model_type in WINDOW_IN_ALL_LAYERS or (
        config.model_type in WINDOW_BY_LAYER_TYPE and "sliding_attention" in config.layer_types
    )
    return config.sliding_window if is_used else None


def _ignores_windows(config: PreTrainedConfig) -> bool:
    """Returns whether the config sets windows that the family's code in transformers does not implement."""
    if config.model_type in WINDOW_BY_LAYER_TYPE:
        return False
    window = None if config.model_type in WINDOW_IN_ALL_LAYERS else getattr(config, "sliding_window", None)
    is_short = window is not None and window < config.max_position_embeddings
    return is_short or "sliding_attention" in (getattr(config, "layer_types", None) or ())


def head_dim(config: PreTrainedConfig) -> int:
    """Returns the size of an attention head. Some families, such as Qwen2, have no setting for it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_rope_parameters(target_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the RoPE parameters of full-attention layers as one flat dict with `rope_type` and `rope_theta`."""
    rope_parameters = target_config.rope_parameters
    return dict(rope_parameters.get("full_attention", rope_parameters))


def check_rope(config: PreTrainedConfig) -> None:
    """Refuse RoPE that the heads, or transformers' classes of the supported families, do not implement.

    Raises:
        UserError: the target's RoPE depends on the length of the text, so that packed and cached forwards would
            differ, or rotates a part of each attention head only.
    """
    rope_parameters = head_rope_parameters(config)
    rope_type, name = rope_parameters["rope_type"], "partial_rotary_factor"
    share = rope_parameters.get(name) or getattr(config, name, None) or 1
    if rope_type not in STATIC_ROPE_TYPES:
        raise UserError(
            f"target.path: the target's RoPE must be one of {', '.join(STATIC_ROPE_TYPES)}, but is {rope_type!r}, "
            "which changes with the length of the text; choose another target"
        )
    if share != 1:
        raise UserError(
            f"target.path: the target's {name} must be 1, because transformers rotates whole attention "
            f"heads in a {config.model_type} and engines would not, but is {share}; choose another target"
        )
