"""Infers the settings of our heads that fit a published head, from its config and its tensors.

Each function returns, for each setting, the values that may fit, most likely first.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.convert.base import Tensors
from mtptrain.convert.published.config_json import DSPARK_KINDS, FROM_1_IN_SGLANG, LAYER_IDS, Config, captured_ids
from mtptrain.convert.published.speculators import SPECULATORS
from mtptrain.heads import HEADS
from mtptrain.heads.dflash import FULL, SLIDING
from mtptrain.heads.dflash2 import published_settings
from mtptrain.heads.eagle3 import can_capture
from mtptrain.heads.layers import SERVED_HEAD_DIMS
from mtptrain.serving.exports import SERVING
from mtptrain.settings.heads import CausalLayers, Dflash2Config
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

Settings = dict[str, list[object]]
OWN_KEYS = {
    "dspark": {"markov_rank": "markov_rank"},
    "dflash2": {name: f"dflash_config.{name}" for name in published_settings(Dflash2Config())},
}
"""The key in `config.json` of each setting that a block drafter has beyond those of DFlash."""


def layer_sizes(directory: Path, name: str, config: Config) -> Settings:
    missing = [key for key in ("hidden_size", "num_attention_heads", "intermediate_size") if key not in config]
    if missing:
        raise UserError(f"{directory / 'config.json'}: must have {missing[0]}, but does not; download the head again")
    heads = config["num_attention_heads"]
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "intermediate_size": config["intermediate_size"],
        "head_dim": config.get("head_dim", config["hidden_size"] // heads),
    }
    if sizes["head_dim"] not in SERVED_HEAD_DIMS or heads % sizes["num_key_value_heads"]:
        raise UserError(
            f"{directory / 'config.json'}: head_dim must be one of {SERVED_HEAD_DIMS}, as in our heads, and "
            f"num_key_value_heads must divide num_attention_heads, but they are {sizes['head_dim']}, "
            f"{sizes['num_key_value_heads']} and {heads}; choose another head"
        )
    known = {field.name for field in fields(HEADS[name].Config)}
    return {setting: [size] for setting, size in sizes.items() if setting in known}


def eagle3_settings(directory: Path, config: Config, tensors: Tensors, target_config: PreTrainedConfig) -> Settings:
    return {
        "draft_vocab_size": [_draft_vocab_size(directory, config, tensors, target_config)],
        "norm_before_fc": [
            "input_norm.weight" in tensors
            or bool(config.get("norm_before_fc") or config.get("eagle_config.norm_before_fc"))
        ],
        "fc_norm": ["fc_norm.0.weight" in tensors or bool(config.get("fc_norm") or config.get("use_aux_norm"))],
        "norm_output": [bool(config.get("norm_output"))],
        "norm_before_residual": [bool(config.get("norm_before_residual"))],
        "capture_layers": list(_eagle3_layers(directory, captured_ids(config), target_config)),
    }


def _draft_vocab_size(directory: Path, config: Config, tensors: Tensors, target_config: PreTrainedConfig) -> int | None:
    """Returns the number of rows of the head's own lm_head; None if it uses the target's."""
    lm_head = tensors.get("lm_head.weight")
    rows = target_config.vocab_size if lm_head is None else len(lm_head)
    if config.get("draft_vocab_size", rows) != rows:
        raise UserError(
            f"{directory / 'config.json'}: draft_vocab_size must be {rows}, the rows of the lm_head that the head uses"
            f", but is {config['draft_vocab_size']}; download the head again"
        )
    return None if lm_head is None else rows


def mask_token_id(directory: Path, config: Config, has_mask: bool) -> int | None:
    """Returns the mask token of an EAGLE-3 layout, which a head with `mask_hidden` has and others have not."""
    ids = [config[name] for name in ("mask_token_id", "pard_token", "ptd_token_id") if name in config]
    if len(set(ids)) != int(has_mask):
        allowed = "one mask_token_id, because the head has a" if has_mask else "no mask_token_id, because it has no"
        raise UserError(
            f"{directory / 'config.json'}: must have {allowed} mask_hidden, but has {ids}; download the head again"
        )
    return int(ids[0]) if has_mask else None


def dflash_settings(
    directory: Path, kind: str, config: Config, tensors: Tensors, target_config: PreTrainedConfig
) -> Settings:
    """Returns the settings of a block drafter of this kind, one of `RULES`."""
    is_dspark, is_dflash2 = kind in DSPARK_KINDS, kind == "dflash2"
    key_of = OWN_KEYS.get(kind, {})
    needed = ["num_hidden_layers", "block_size", "dflash_config.target_layer_ids", "dflash_config.mask_token_id"]
    missing = [key for key in (*needed, *key_of.values()) if key not in config]
    if missing:
        raise UserError(f"{directory / 'config.json'}: must have {missing[0]}, but does not; download the head again")
    layers = [layer + 1 for layer in config["dflash_config.target_layer_ids"]]
    return {
        "num_layers": [config["num_hidden_layers"]],
        "capture_layers": list(_capturable(directory, "dflash_config.target_layer_ids", [layers], target_config)),
        "mask_token_id": [config["dflash_config.mask_token_id"]],
        # The block size of DSpark's class counts the drafts, that of the others also the newest token.
        "ttt_steps": [config["block_size"] - (not is_dspark)],
        "draft_vocab_size": [None if is_dflash2 else _draft_vocab_size(directory, config, tensors, target_config)],
        **{setting: [value] for setting, value in _dflash_attention(directory, config).items()},
        **{setting: [config[key]] for setting, key in key_of.items()},
        "sample_from_anchor": [config.get("sample_from_anchor", is_dspark)],
    }


def _dflash_attention(directory: Path, config: Config) -> dict[str, Any]:
    """Returns the settings of a DFlash head's layers, as vLLM's class reads them.

    Raises:
        UserError: layers slide without a window that is switched on, or there is not one type for each layer.
    """
    num_layers, uses_swa = config["num_hidden_layers"], config.get("dflash_config.use_swa")
    types = config.get("layer_types", [FULL] * num_layers)
    unset = CausalLayers.sliding if SLIDING in types else CausalLayers.none
    if uses_swa and SLIDING not in types:
        types = [SLIDING] * num_layers
    is_on = uses_swa or config.get("use_sliding_window")
    window = config.get("dflash_config.swa_window_size", config.get("sliding_window") if is_on else None)
    if len(types) != num_layers or (SLIDING in types and window is None):
        needed = "a sliding_window, and use_sliding_window=true, for its sliding layers"
        wanted = f"{num_layers} layer_types" if len(types) != num_layers else needed
        raise UserError(f"{directory / 'config.json'}: must have {wanted}, but does not; download the head again")
    is_causal = config.get("is_causal", config.get("dflash_config.causal"))
    causal = unset if is_causal is None else CausalLayers.all if is_causal else CausalLayers.none
    return {"layer_types": types, "sliding_window": window if SLIDING in types else None, "causal": causal}


def _eagle3_layers(directory: Path, ids: list[int] | None, target_config: PreTrainedConfig) -> list[list[int]]:
    """Returns the capture layers that the layer ids may mean, most likely first. None means the engines' default.

    SGLang numbers layers differently from the other engines. The `serving.json` of our own exports names the engine.
    Speculators counts as we do. ModelOpt and SpecForge count as SGLang does in most families, and write the ids in
    `eagle_config` alone.
    """
    num_layers, note = target_config.num_hidden_layers, ""
    if ids is None:
        choices, note = [[2, num_layers // 2, num_layers - 3]], " (2, n // 2 and n - 3, because they are left out)"
    elif target_config.model_type in FROM_1_IN_SGLANG and ids[0] != 1:
        choices = [ids]  # which SGLang reads so too
    else:
        as_sglang, serving = [layer + 1 for layer in ids], directory / SERVING
        stored = read_json(directory / "config.json")
        engine = read_json(serving).get("engine") if serving.is_file() else stored.get(SPECULATORS)
        either = [as_sglang, ids] if stored.get(LAYER_IDS) is None else [ids, as_sglang]
        choices = either if engine is None else [as_sglang if engine == "sglang" else ids]
    return _capturable(directory, LAYER_IDS, choices, target_config, note)


def _capturable(
    directory: Path, key: str, choices: list[list[int]], target_config: PreTrainedConfig, note: str = ""
) -> list[list[int]]:
    """Returns the choices of layers that a head can capture from the target. An error ends with the note.

    Raises:
        UserError: there are none.
    """
    num_layers = target_config.num_hidden_layers
    fitting = [layers for layers in choices if can_capture(layers, num_layers)]
    if not fitting:
        raise UserError(
            f"{directory / 'config.json'}: {key} must name different layers of the target's {num_layers} in rising "
            f"order, but mean the streams after {' or '.join(map(str, choices))} layers{note}; the head belongs to "
            "another target"
        )
    return fitting
