"""Says what vLLM 0.32 does not serve of a head and a target."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

from mtptrain.engines.limits import SIZES, Refusal, different_sizes, is_mimo, no_anchor, quantised, window_of
from mtptrain.engines.vllm.families import WITHOUT_STREAMS
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.settings.heads import (
    DflashConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    NativeMtpConfig,
)

TRAIN_MTP = "train head=mtp with head.prenorm_states=true and head.zero_first_embedding=true"
IN_BF16 = "export for the target in bf16"


def why_not(head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
    reads_streams = isinstance(head, (Eagle3Config, DflashConfig))
    if reads_streams and target.model_type in WITHOUT_STREAMS:
        must_be = "of a family whose layers can be captured"
        reason = "vLLM's class does not return its residual streams"
        yield Refusal("target.path", must_be, target.model_type, reason, TRAIN_MTP if is_mimo(target) else "")
    yield from no_anchor("vLLM", head)
    if isinstance(head, (EagleConfig, MedusaConfig)) and is_mimo(target):
        yield Refusal(
            "target.path", "of a family other than mimo", "mimo",
            "vLLM passes the states before the target's final norm to the head, which reads those after it",
            TRAIN_MTP,
        )  # fmt: skip
    if isinstance(head, NativeMtpConfig):
        yield from why_not_native(target)
    if isinstance(head, MtpConfig):
        yield from why_not_mtp(head, target)


def why_not_native(target: PreTrainedConfig) -> Iterator[Refusal]:
    families, native = ", ".join(NATIVE_MTP), NATIVE_MTP.get(target.model_type)
    if native is None:
        must_be = f"of a family with MTP modules ({families})"
        reason = "vLLM has no such class for others"
        yield Refusal("target.path", must_be, f"a {target.model_type}", reason)
        return
    num_modules = getattr(target, native.count, None) or 0
    if num_modules > 1 and not native.is_first_of_several:
        reason = "vLLM drafts each depth with a module of its own, but the head is the first module at all depths"
        yield Refusal("target.path", "a target with one MTP module", num_modules, reason)
    yield from quantised(target, "vLLM builds the module with the target's quantisation", IN_BF16)


def why_not_mtp(head: MtpConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what vLLM does not serve of head `mtp`: for a mimo target its class is MiMo's, otherwise DeepSeek's."""
    yield from quantised(target, "vLLM builds the layers of this head with the target's quantisation", IN_BF16)
    of_mimo = {
        "prenorm_states": "vLLM passes a head the states before the final norm only if the target is a mimo",
        "zero_first_embedding": "of the vLLM classes for this head, only MiMo's zeroes the embedding at position 0",
    }
    for setting, reason in of_mimo.items():
        if getattr(head, setting) != is_mimo(target):
            must_be, is_set = "true for a mimo target and false for any other", str(getattr(head, setting)).lower()
            yield Refusal(f"head.{setting}", must_be, is_set, reason, "change it and train again")
    if not is_mimo(target):
        if head.attention_bias:
            must_be = "false for families other than mimo"
            reason = "of the vLLM classes that serve this head, only MiMo's has biases"
            yield Refusal("head.attention_bias", must_be, "true", reason, "train without it")
        return
    if (value := different_sizes(head, target)) is not None:
        must_be = f"a layer with the mimo target's sizes {SIZES}"
        reason = "vLLM builds MiMo's MTP layer from the target's config"
        settings = "head.num_attention_heads, head.num_key_value_heads and head.intermediate_size"
        yield Refusal("head", must_be, value, reason, f"set {settings} to the target's, and train again")
    if (value := window_of(target)) is not None:
        reason = "vLLM builds MiMo's MTP layer with the target's window, but the head was trained without one"
        yield Refusal("target.path", "a mimo target without a sliding window", value, reason, "train head=draft_model")
