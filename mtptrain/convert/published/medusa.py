"""Reads published Medusa heads in vLLM's layout, or in that of FasterDecoding, the project of Medusa's authors.

Published heads may have an lm_head per depth. Our heads use the target's lm_head instead; a published lm_head is only
compared with it.
"""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.convert.base import Tensors
from mtptrain.utils.errors import UserError

FASTER_DECODING = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
"""Layer j of depth i is `i.j.linear`. The lm_head of depth i is `i.j`, where j is the number of layers."""


def is_medusa(config: dict[str, Any], names: set[str]) -> bool:
    """Returns whether a directory with this config.json and these tensors holds a Medusa head."""
    return config.get("model_type") == "medusa" or any(
        match[3] for name in names if (match := FASTER_DECODING.match(name))
    )


def own_name(name: str) -> str:
    """Returns the name that vLLM and our own heads use for a tensor of a Medusa head."""
    match = FASTER_DECODING.match(name)
    if match is not None:
        depth, layer, is_layer, kind = match.groups()
        name = f"blocks.{depth}.layers.{layer}.{kind}" if is_layer else f"lm_heads.{depth}.{kind}"
    return name.removeprefix("medusa_heads.")


def medusa_settings(directory: Path, config: dict[str, Any], tensors: Tensors) -> dict[str, list[object]]:
    """Returns the head's settings, inferred from its tensor names.

    Raises:
        UserError: the config counts other depths or layers, by vLLM's keys, than the tensors have.
    """
    layers = {tuple(map(int, name.split(".")[1:4:2])) for name in tensors if name.startswith("blocks.")}
    counts = [len({each[part] for each in layers}) for part in (0, 1)]
    for key, count in zip(("num_heads", "num_hidden_layers"), counts, strict=True):
        if config.get(key, count) != count:
            raise UserError(
                f"{directory / 'config.json'}: {key} must be {count}, as many as have tensors, but is {config[key]}; "
                "download the head again"
            )
    return {
        "ttt_steps": [counts[0]],
        "num_layers": [counts[1]],
        "fc_bias": [any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)],
    }


def check_lm_heads(directory: Path, tensors: Tensors, target_config: PreTrainedConfig) -> None:
    """Check that each lm_head has a row for each token of the target.

    Raises:
        UserError: an lm_head has another number of rows.
    """
    vocab_size = target_config.vocab_size
    for name, tensor in sorted(tensors.items()):
        if name.startswith("lm_head") and len(tensor) != vocab_size:
            raise UserError(
                f"head.init_from: {name} of {directory} must have {vocab_size} rows, the target's vocabulary, but has "
                f"{len(tensor)}; the head belongs to another target; set target.path to that target"
            )
