"""Has what the engines' `why_not` share: a refusal, and checks of captured layers, sliding windows and sizes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedConfig

from mtptrain.heads import HEADS
from mtptrain.heads.draft_model import model_config
from mtptrain.heads.layers import head_dims
from mtptrain.settings.heads import DflashConfig, DraftModelConfig, HeadConfig, LayerConfig
from mtptrain.target.families import head_dim, key_heads, mlp_size, sliding_window
from mtptrain.target.mimo import MiMoConfig

SIZES = "(attention heads, key/value heads, head dim, intermediate size)"


class Refusal(NamedTuple):
    """Something that an engine does not serve, and the parts of the message that says so."""

    setting: str
    must_be: str
    value: object
    """The setting or target that was found."""
    reason: str
    instead: str = ""
    """Advice. The message also names the engines that serve the head as it is, and other heads for a target."""
    may_change_engine: bool = True
    """Whether another engine can be the remedy."""


def is_mimo(target: PreTrainedConfig) -> bool:
    return bool(target.model_type == MiMoConfig.model_type)


def must_be_false(head: HeadConfig, setting: str, reason: str, instead: str = "train without it") -> Iterator[Refusal]:
    if getattr(head, setting):
        yield Refusal(f"head.{setting}", "false", "true", reason, instead)


def captured_layers(head: HeadConfig, target: PreTrainedConfig) -> tuple[int, ...]:
    return HEADS[head.name].resolve_capture_layers(head, target)


def layers_must(layers: tuple[int, ...], must_be: str, reason: str) -> Refusal:
    return Refusal("head.capture_layers", must_be, list(layers), reason, "train with other layers")


def why_not_captured(
    engine: str,
    head: HeadConfig,
    target: PreTrainedConfig,
    *,
    has_embeddings: bool = True,
    at_last: str = "",
    has_three: bool = False,
    has_own_lm_head: bool = True,
) -> Iterator[Refusal]:
    """Yields what an engine does not serve of a head that reads captured layers.

    It may have an id for layer 0, and a reason why it cannot capture the stream after the last layer. Its class of
    EAGLE-3 may read exactly three layers. Its block drafters may have an lm_head for a vocabulary of their own.
    """
    layers = captured_layers(head, target)
    if head.name == "eagle3" and has_three and len(layers) != 3:
        yield layers_must(layers, "three", f"{engine} reads exactly three")
    if at_last and layers[-1] == target.num_hidden_layers:
        yield layers_must(layers, "below the target's last layer", at_last)
    if layers[0] == 0 and not has_embeddings:
        reason = f"{engine} counts layers from 0, by their outputs, and has no id for the embeddings"
        yield layers_must(layers, "above 0 (the embeddings)", reason)
    if head.name == "eagle3" and not has_three:
        yield from must_be_false(head, "norm_before_residual", f"{engine} takes the residual before the norm")
        if len(layers) == 1:
            yield layers_must(layers, "two or more", f"{engine} applies fc only if it reduces the width of the state")
    if isinstance(head, DflashConfig) and head.draft_vocab_size and not has_own_lm_head:
        reason = f"{engine} gives the head the target's lm_head"
        yield Refusal("head.draft_vocab_size", "null", head.draft_vocab_size, reason, "train without it")


def no_anchor(engine: str, head: HeadConfig) -> Iterator[Refusal]:
    """Yields a refusal if the newest token drafts in a head of an engine's plain class of DFlash."""
    if head.name == "dflash":
        yield from must_be_false(head, "sample_from_anchor", f"{engine}'s class drafts nothing with the newest token")


def quantised(target: PreTrainedConfig, reason: str, instead: str) -> Iterator[Refusal]:
    if (settings := getattr(target, "quantization_config", None)) is not None:
        value = f"quantised with {settings.get('quant_method', 'an unnamed method')}"
        yield Refusal("target.path", "a target that is not quantised", value, reason, instead, may_change_engine=False)


def window_of(model: PreTrainedConfig) -> str | None:
    """Returns the size of a model's sliding window, for a message; None if it has none within its context."""
    window = sliding_window(model)
    return (
        None if window is None or window >= model.max_position_embeddings else f"one with a window of {window} tokens"
    )


def models_of(head: HeadConfig, target: PreTrainedConfig) -> list[tuple[str, str, PreTrainedConfig]]:
    """Returns the target, and the model that drafts if there is one, each with the setting and the word for it."""
    models = [("target.path", "target", target)]
    if isinstance(head, DraftModelConfig):
        models.append(("head.init_from", "model", model_config(head, target)))
    return models


def why_not_family(
    setting: str, kind: str, model: PreTrainedConfig, families: Sequence[str], others: str, windows: str
) -> Iterator[Refusal]:
    """Yields why an engine does not serve a model of other families, or one with a sliding window: two reasons."""
    if model.model_type not in families:
        yield Refusal(setting, f"a {kind} of one of {', '.join(families)}", f"a {model.model_type}", others)
    if (value := window_of(model)) is not None:
        yield Refusal(setting, f"a {kind} without a sliding window", value, windows)


def why_not_keys(
    engine: str,
    setting: str,
    kind: str,
    model: PreTrainedConfig,
    usual: str | None = None,
    with_biases: Sequence[str] = ("llama",),
) -> Iterator[Refusal]:
    """Yields two keys of a model's config that some engines do not read: its activation, and biases of attention.

    `usual` is the activation that the engine computes, by default that of the family, and `with_biases` are the
    families whose biases it loads.
    """
    usual = usual or getattr(type(model)(), "hidden_act", None)
    if getattr(model, "hidden_act", usual) != usual:
        reason = f"{engine} computes that in this family, whatever the config says"
        yield Refusal(setting, f"a {kind} with hidden_act={usual}", model.hidden_act, reason)
    if getattr(model, "attention_bias", False) and model.model_type not in with_biases:
        reason = f"{engine}'s class of a {model.model_type} does not load these biases"
        yield Refusal(setting, f"a {kind} with attention_bias=false", "true", reason)


def different_sizes(head: LayerConfig, target: PreTrainedConfig) -> str | None:
    """Returns the head's sizes if they differ from those of the target's layers, for a message; None otherwise."""
    dims = head_dims(head, target)
    of_head = (dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim, dims.intermediate_size)
    of_target = (target.num_attention_heads, key_heads(target), head_dim(target), mlp_size(target))
    return None if of_head == of_target else f"one with {of_head} instead of {of_target}"
