"""Reads the config.json of a published head, also in the layout of vLLM Speculators, as that of an engine's class.

Speculators keeps the settings of the layers in `transformer_layer_config`, counts captured layers as we do, and has
other keys for the causality of blocks. Sources: Speculators 0.9, and vLLM's `configs/speculators/algos.py`. Where the
two take an absent key for different values, the key must be there.
"""

from pathlib import Path
from typing import Any

from mtptrain.heads.dflash import SLIDING
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

SPECULATORS = "speculators_model_type"
"""The key that marks the layout."""
ARCHITECTURES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "peagle": "LlamaForCausalLMEagle3",
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
    "dflash2": "DFlash2DraftModel",
}
"""The class in engines of each kind of head that can be read."""
DESCRIPTIONS = (SPECULATORS, "speculators_version", "speculators_config", "transformer_layer_config")
CAPTURED, NON_CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal"
NEEDED = {
    "eagle3": ("norm_before_residual",),
    "peagle": ("norm_before_residual", "mask_token_id"),
    "dflash": ("block_size", "mask_token_id", CAPTURED, NON_CAUSAL, "sample_from_anchor"),
}
"""Keys that a config must have, by kind; `dspark` and `dflash2` need those of `dflash`."""
IN_SECTION = ("mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of block drafters that engines read in `dflash_config`."""


def engine_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a head, with the keys of an engine's class.

    Raises:
        UserError: Speculators' layout lacks a key, or is that of a kind of head that cannot be read.
    """
    path = directory / "config.json"
    stored = read_json(path, "copy or download it again")
    kind = stored.get(SPECULATORS)
    if kind is None:
        return stored
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{path}: {SPECULATORS} must be one of {', '.join(ARCHITECTURES)}, but is {kind}; choose another head"
        )
    needed = ("transformer_layer_config", *NEEDED.get(kind, NEEDED["dflash"]))
    if missing := [key for key in needed if stored.get(key) is None]:
        raise UserError(f"{path}: must have {missing[0]}, but does not; download the head again")
    layers, captured = stored["transformer_layer_config"], stored.get(CAPTURED, [])
    if not isinstance(layers, dict) or not isinstance(captured, list):
        raise UserError(
            f"{path}: transformer_layer_config must hold settings and {CAPTURED} a list, but they are {layers} and "
            f"{captured}; download the head again"
        )
    config = layers | {key: value for key, value in stored.items() if key not in DESCRIPTIONS}
    config["architectures"] = [ARCHITECTURES[kind]]
    return config if kind in ("eagle3", "peagle") else _block_drafter(kind, config)


def _block_drafter(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a block drafter with the keys of its class."""
    section = {key: config.pop(key) for key in IN_SECTION if key in config}
    section["target_layer_ids"] = [layer - 1 if isinstance(layer, int) else layer for layer in config.pop(CAPTURED)]
    if config.pop(NON_CAUSAL):
        config["is_causal"] = (
            False  # otherwise, and without this key, layers that slide are causal and full ones are not
        )
    if SLIDING in (config.get("layer_types") or ()):
        config["use_sliding_window"] = config.get("sliding_window") is not None
    if kind == "dspark" and not config["sample_from_anchor"] and isinstance(config["block_size"], int):
        config["block_size"] -= 1  # Speculators counts the newest token then
    return config | {"dflash_config": section}
