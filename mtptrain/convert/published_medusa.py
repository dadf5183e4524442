"""Reads published Medusa heads in vLLM's layout, or in that of FasterDecoding, the project of Medusa's authors.

Published heads may have an lm_head per depth. Our heads use the target's lm_head instead; a published lm_head is only
compared with it.
"""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.convert.base import Tensors

FASTER_DECODING = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
"""Layer j of depth i is `i.j.linear`. The lm_head of depth i is `i.j`, where j is the number of layers."""
COUNTS = ("num_heads", "num_hidden_layers", "medusa_num_heads", "medusa_num_layers")
"""Keys of config.json, in either layout, from which vLLM reads the number of depths and of layers."""


def is_medusa(config: dict[str, Any], names: set[str]) -> bool:
    """Returns whether a directory with this config.json and these tensors holds a Medusa head."""
    return config.get("model_type") == "medusa" or any(
        match[3] for name in names if (match := FASTER_DECODING.match(name))
    )


def medusa_tensors(tensors: Tensors) -> Tensors:
    """Returns the tensors under the names that vLLM and our own heads use."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        match = FASTER_DECODING.match(name)
        if match is not None:
            depth, layer, is_layer, kind = match.groups()
            name = f"blocks.{depth}.layers.{layer}.{kind}" if is_layer else f"lm_heads.{depth}.{kind}"
        renamed[name.removeprefix("medusa_heads.")] = tensor
    return renamed


def medusa_settings(tensors: Tensors) -> dict[str, list[object]]:
    """Returns the head's settings, inferred from its tensor names."""
    layers = {tuple(map(int, name.split(".")[1:4:2])) for name in tensors if name.startswith("blocks.")}
    return {
        "ttt_steps": [len({depth for depth, _ in layers})],
        "num_layers": [len({layer for _, layer in layers})],
        "fc_bias": [any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)],
    }


def check_medusa(directory: Path, config: dict[str, Any], tensors: Tensors, target_config: PreTrainedConfig) -> None:
    """Check that a head fits the target and that vLLM will not misread its config.json.

    Raises:
        ValueError: one of these checks fails.
    """
    path, vocab_size = directory / "config.json", target_config.vocab_size
    renamed = [key for key in config if "num" in key and ("heads" in key or "layers" in key) and key not in COUNTS]
    if renamed:
        raise ValueError(
            f"{path}: must have no number of heads or layers besides num_heads and num_hidden_layers, because vLLM "
            f"takes any key that contains num and heads, or num and layers, for one of them, but has {renamed[0]}; "
            "remove it"
        )
    wanted = {"vocab_size": vocab_size, "truncated_vocab_size": vocab_size, "hidden_size": target_config.hidden_size}
    for name, value in {**wanted, "logit_scale": 1.0}.items():
        if config.get(name) not in (None, value):
            reason = " for this target" if name in wanted else ", as in our heads"
            raise ValueError(f"{path}: {name} must be {value}{reason}, but is {config[name]}; choose another head")
    for name, tensor in sorted(tensors.items()):
        if name.startswith("lm_head") and len(tensor) != vocab_size:
            raise ValueError(
                f"head.init_from: {name} of {directory} must have {vocab_size} rows, the target's vocabulary, but has "
                f"{len(tensor)}; the head belongs to another target"
            )
