"""Reads the config.json of a published head, also in the layout of vLLM Speculators, as that of an engine's class.

Speculators keeps the settings of the layers in `transformer_layer_config`, counts captured layers as we do, and says
with a key of its own whether layers that slide are causal; full layers never are. vLLM 0.32 takes that key for all
layers of `dflash`; here it means what it meant in training. Windows are those of engines, which move on with each token
of a block, while Speculators trains all tokens of a block with the window of the first. Sources: Speculators 0.9, and
vLLM's `configs/speculators/algos.py`.
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
LAYERS, CAPTURED, NON_CAUSAL = "transformer_layer_config", "aux_hidden_state_layer_ids", "sliding_window_non_causal"
DESCRIPTIONS = (SPECULATORS, "speculators_version", "speculators_config", LAYERS)
IN_SECTION = ("mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of block drafters that engines read in `dflash_config`."""


def engine_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a head, with the keys of an engine's class.

    Raises:
        UserError: Speculators' layout is damaged, or that of a kind of head that cannot be read, or lacks a key whose
            absence Speculators and vLLM read differently.
    """
    path = directory / "config.json"
    stored = read_json(path, "copy or download it again")
    kind, layers, captured = stored.get(SPECULATORS), stored.get(LAYERS), stored.get(CAPTURED)
    if kind is None:
        return stored
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(
            f"{path}: {SPECULATORS} must be one of {', '.join(ARCHITECTURES)}, but is {kind}; choose another head"
        )
    if not isinstance(layers, dict):
        raise UserError(f"{path}: {LAYERS} must hold settings, but is {layers}; download the head again")
    config = layers | {key: value for key, value in stored.items() if key not in DESCRIPTIONS}
    config["architectures"] = [ARCHITECTURES[kind]]
    types = config.get("layer_types")
    slides = isinstance(types, list) and SLIDING in types
    ambiguous = {
        "norm_before_residual": kind == "eagle3",
        "sample_from_anchor": kind == "dspark",
        NON_CAUSAL: slides and kind in ("dflash", "dspark"),
    }
    for key, is_ambiguous in ambiguous.items():
        if is_ambiguous and not isinstance(config.get(key), bool):
            raise UserError(
                f"{path}: {key} must be true or false, but is {config.get(key)}, which Speculators and vLLM read "
                f"differently; add {key} as the head was trained to a copy of the file"
            )
    if kind in ("eagle3", "peagle"):
        return config
    if not isinstance(captured, list) or not all(type(layer) is int for layer in captured):
        raise UserError(f"{path}: {CAPTURED} must be a list of layers, but is {captured}; download the head again")
    config.pop(CAPTURED)
    if config.pop(NON_CAUSAL, kind == "dflash2"):  # the default of both
        config["is_causal"] = False  # without this key, layers that slide are causal and full ones are not
    if slides:
        config.setdefault("use_sliding_window", True)
    if kind == "dspark" and not config["sample_from_anchor"] and isinstance(config.get("block_size"), int):
        config["block_size"] -= 1  # Speculators counts the newest token then
    section = {key: config.pop(key) for key in IN_SECTION if key in config}
    return config | {"dflash_config": section | {"target_layer_ids": [layer - 1 for layer in captured]}}
