"""The family MiMo of Xiaomi for transformers: Qwen2's decoder, with an MTP layer beside it in the checkpoint.

transformers has no class for it, and the code that comes with a checkpoint is never run. Importing this module makes
`AutoConfig` and `AutoModelForCausalLM` read these checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

ARCHITECTURE = "MiMoForCausalLM"
"""The engines' model class, which `config.json` names."""
MTP_LAYERS = "model.mtp_layers."
"""Prefix of the tensors of MTP layers, which the target itself does not have."""


class MiMoConfig(Qwen2Config):
    """Qwen2's config under the name of the family."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's model, which leaves the MTP layers of a checkpoint unread."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [rf"^{MTP_LAYERS}"]  # noqa: RUF012 (never changed)


AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def is_mimo(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is that of a MiMo model, published or exported (see `VllmMimo`)."""
    return config.get("model_type") == MiMoConfig.model_type or config.get("architectures") == [ARCHITECTURE]
