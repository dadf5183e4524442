"""Chooses the engine that runs the target for its hidden states."""

from transformers import PreTrainedConfig

from mtptrain.config import Backend
from mtptrain.engines.vllm.families import WITHOUT_STREAMS
from mtptrain.target.families import head_dim, sliding_window
from mtptrain.target.form import find_form
from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import print_once


def choose_backend(setting: Backend, target_config: PreTrainedConfig) -> Backend:
    """Returns the engine that runs the target: vllm or transformers. A line on stderr says why `auto` is not vllm."""
    if setting is Backend.transformers:
        return setting
    if not (reason := _why_not_vllm(target_config)):
        return Backend.vllm
    family = target_config.model_type
    if setting is Backend.vllm:
        raise UserError(
            "hidden_states.backend: the target must be one that vLLM extracts hidden states from, but family "
            f"{family!r} {reason}; set hidden_states.backend=transformers"
        )
    print_once(f"hidden_states.backend: transformers, because family {family!r} {reason}", "MTPTRAIN_BACKEND")
    return Backend.transformers


def _why_not_vllm(target_config: PreTrainedConfig) -> str:
    """Returns what a family has from which vLLM is known not to extract hidden states, or an empty string.

    For other families vLLM itself refuses, when it starts, to capture layers that it cannot.
    """
    family = target_config.model_type
    head_size = target_config.hidden_size // target_config.num_attention_heads
    if family in WITHOUT_STREAMS:
        return "has layers that vLLM cannot capture"
    if find_form(target_config).keeps_states:
        return "has layers that keep states, whose cache has no room for hidden states"
    if getattr(target_config, "kv_lora_rank", None) is not None:
        return "has multi-head latent attention, whose cache has no room for hidden states"
    if family in ("qwen2", "qwen3") and sliding_window(target_config) is not None:
        return "has a sliding window in some of its layers, which vLLM does not support for this family"
    if family == "qwen2" and head_dim(target_config) != head_size:
        return f"has head_dim={head_dim(target_config)}, but vLLM uses hidden_size / num_attention_heads={head_size}"
    return ""
