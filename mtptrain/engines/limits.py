"""Has what the engines' `why_not` share: a refusal, and checks of captured layers, sliding windows and sizes."""

from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig

from mtptrain.heads import HEADS
from mtptrain.heads.layers import head_dims
from mtptrain.settings.heads import HeadConfig, LayerConfig
from mtptrain.target.families import head_dim, key_heads, mlp_size, sliding_window
from mtptrain.target.mimo import MiMoConfig

ABOVE_0, BELOW_LAST = "above 0 (the embeddings)", "below the target's last layer"
SIZES = "(attention heads, key/value heads, head dim, intermediate size)"


class Refusal(NamedTuple):
    """Something that an engine does not serve, and the parts of the message that says so."""

    setting: str
    must_be: str
    value: object
    """The setting or target that was found."""
    reason: str
    instead: str = ""
    """Advice. The message also names the engines that serve the head as it is."""
    may_change_engine: bool = True
    """Whether another engine can be the remedy."""


def is_mimo(target: PreTrainedConfig) -> bool:
    return bool(target.model_type == MiMoConfig.model_type)


def must_be_false(head: HeadConfig, setting: str, reason: str, instead: str = "train without it") -> Iterator[Refusal]:
    """Yields a refusal if a setting of the head is true."""
    if getattr(head, setting):
        yield Refusal(f"head.{setting}", "false", "true", reason, instead)


def captured_layers(head: HeadConfig, target: PreTrainedConfig) -> tuple[int, ...]:
    return HEADS[head.name].resolve_capture_layers(head, target)


def layers_must(layers: tuple[int, ...], must_be: str, reason: str) -> Refusal:
    """Returns the refusal of these captured layers."""
    return Refusal("head.capture_layers", must_be, list(layers), reason, "train with other layers")


def quantised(target: PreTrainedConfig, reason: str, instead: str) -> Iterator[Refusal]:
    """Yields a refusal if the target is quantised."""
    if (settings := getattr(target, "quantization_config", None)) is not None:
        value = f"quantised with {settings.get('quant_method', 'an unnamed method')}"
        yield Refusal("target.path", "a target that is not quantised", value, reason, instead, may_change_engine=False)


def window_of(model: PreTrainedConfig) -> str | None:
    """Returns the size of a model's sliding window, for a message; None if it has none within its context."""
    window = sliding_window(model)
    return (
        None if window is None or window >= model.max_position_embeddings else f"one with a window of {window} tokens"
    )


def different_sizes(head: LayerConfig, target: PreTrainedConfig) -> str | None:
    """Returns the head's sizes if they differ from those of the target's layers, for a message; None otherwise."""
    dims = head_dims(head, target)
    of_head = (dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim, dims.intermediate_size)
    of_target = (target.num_attention_heads, key_heads(target), head_dim(target), mlp_size(target))
    return None if of_head == of_target else f"one with {of_head} instead of {of_target}"
