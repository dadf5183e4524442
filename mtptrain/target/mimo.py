"""Xiaomi's MiMo family for transformers: Qwen2's decoder, without the MTP layer that MiMo's checkpoints also hold.

transformers has no class for MiMo, and mtptrain never runs the code that comes with a checkpoint. Importing this
module makes `AutoConfig` and `AutoModelForCausalLM` read these checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

ARCHITECTURE = "MiMoForCausalLM"
"""The engines' model class for MiMo, as named in `config.json`."""
MTP_LAYERS = "model.mtp_layers."
"""Prefix of the tensors of MTP layers, which the target does not load."""


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's model, which ignores the MTP layers of a checkpoint."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [rf"^{MTP_LAYERS}"]  # noqa: RUF012 (never changed)


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def is_mimo_json(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` belongs to a published MiMo model, or to an export in MiMo's format."""
    return config.get("model_type") == MiMoConfig.model_type or config.get("architectures") == [ARCHITECTURE]
