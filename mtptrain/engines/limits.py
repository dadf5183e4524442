"""Limits of export formats: heads and targets that an engine cannot serve, with reasons and alternatives."""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from mtptrain.engines.exports import (
    FAMILIES_OF_OPENVINO,
    STREAMS_OF_LLAMA_CPP,
    STREAMS_OF_SGLANG,
    WITHOUT_STREAMS_IN_VLLM,
)
from mtptrain.engines.llama_cpp.formats import ARCHITECTURE_OF
from mtptrain.engines.transformers import MODEL_CLASSES
from mtptrain.heads import HEADS
from mtptrain.heads.dflash import layer_kinds
from mtptrain.heads.draft_model import model_config
from mtptrain.heads.eagle3 import FROM_1_IN_SGLANG
from mtptrain.heads.layers import head_dims
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.settings.heads import Dflash2Config, DflashConfig, HeadConfig, LayerConfig, MtpConfig
from mtptrain.target.families import head_dim, head_rope_parameters, key_heads, mlp_size, sliding_window
from mtptrain.target.mimo import MiMoConfig
from mtptrain.utils.errors import UserError

BLOCK_DRAFTERS = ("dflash", "dspark", "dflash2")
WITH_STREAMS = ("eagle3", *BLOCK_DRAFTERS)
FindViolation = Callable[[Any, PreTrainedConfig], object]
"""Returns the value of the head or target that the engine does not support, or None."""


class Limit(NamedTuple):
    """A restriction of an engine, and the parts of its error message."""

    engine: str
    heads: tuple[str, ...]
    setting: str
    must_be: str
    find_violation: FindViolation
    reason: str
    instead: str


def is_set(name: str) -> FindViolation:
    """Returns a function that finds whether a setting of the head is true."""
    return lambda head, target: "true" if getattr(head, name) else None


def of_mimo(find_violation: FindViolation) -> FindViolation:
    """Returns a function that looks at mimo targets only."""
    return lambda head, target: find_violation(head, target) if is_mimo(target) else None


def of_draft_model(find_violation: FindViolation) -> FindViolation:
    """Returns a function that looks at the config of a draft model instead of the target's."""
    return lambda head, target: find_violation(head, model_config(head, target))


def quantisation(head: HeadConfig, target: PreTrainedConfig) -> object:
    found = getattr(target, "quantization_config", None)
    return None if found is None else f"quantised with {found.get('quant_method', 'an unnamed method')}"


def family_in(families: Container[str]) -> FindViolation:
    return lambda head, target: target.model_type if target.model_type in families else None


def family_outside(families: Container[str]) -> FindViolation:
    return lambda head, target: None if target.model_type in families else f"a {target.model_type}"


def several_mtp_modules(head: HeadConfig, target: PreTrainedConfig) -> object:
    native = NATIVE_MTP[target.model_type]
    declared = getattr(target, native.count, None) or 0
    return declared if declared > 1 and not native.is_first_of_several else None


def captured(is_refused: Callable[[tuple[int, ...], PreTrainedConfig], bool]) -> FindViolation:
    """Returns a function that finds the captured layers if the engine refuses them."""

    def find(head: HeadConfig, target: PreTrainedConfig) -> object:
        layers = HEADS[head.name].resolve_capture_layers(head, target)
        return list(layers) if is_refused(layers, target) else None

    return find


last_stream = captured(lambda layers, target: layers[-1] == target.num_hidden_layers)
embeddings_stream = captured(lambda layers, target: layers[0] == 0)
single_stream = captured(lambda layers, target: len(layers) == 1)
other_than_three_streams = captured(lambda layers, target: len(layers) != 3)
stream_1_counted_from_1 = captured(lambda layers, target: target.model_type in FROM_1_IN_SGLANG and layers[0] == 1)


def other_activation(head: HeadConfig, target: PreTrainedConfig) -> object:
    found = getattr(target, "hidden_act", "silu")
    return None if found == "silu" else found


def biases_beside_llama(head: HeadConfig, target: PreTrainedConfig) -> object:
    is_llama = ARCHITECTURE_OF.get(target.model_type) == ARCHITECTURE_OF["llama"]
    return "true" if getattr(target, "attention_bias", False) and not is_llama else None


def unnormed_experts(head: HeadConfig, target: PreTrainedConfig) -> object:
    return "false" if getattr(target, "norm_topk_prob", None) is False else None


def window(head: HeadConfig, target: PreTrainedConfig) -> object:
    found = sliding_window(target)
    return None if found is None or found >= target.max_position_embeddings else f"one with a window of {found} tokens"


def unknown_draft_model(head: HeadConfig, model: PreTrainedConfig) -> object:
    """Returns what llama.cpp does not know of a draft model: its family, its window, or how its RoPE is scaled."""
    if model.model_type not in ARCHITECTURE_OF:
        return f"a {model.model_type}"
    if (found := window(head, model)) is not None:
        return found
    rope_type = head_rope_parameters(model)["rope_type"]
    has_factors = ARCHITECTURE_OF[model.model_type] == ARCHITECTURE_OF["llama"]
    return None if rope_type == "default" or has_factors else f"a {model.model_type} with {rope_type} RoPE"


def own_lm_head(head: DflashConfig, target: PreTrainedConfig) -> object:
    return head.draft_vocab_size


def many_candidates(head: Dflash2Config, target: PreTrainedConfig) -> object:
    return head.selector_top_k if head.selector_top_k * (head.selector_top_k + 1) > target.hidden_size else None


def causal_layers(head: DflashConfig, target: PreTrainedConfig) -> object:
    return str(head.causal) if any(kind.is_causal for kind in layer_kinds(head)) else None


def causal_in_some(head: DflashConfig, target: PreTrainedConfig) -> object:
    return str(head.causal) if len({kind.is_causal for kind in layer_kinds(head)}) > 1 else None


def is_mimo(target: PreTrainedConfig) -> bool:
    return bool(target.model_type == MiMoConfig.model_type)


def biases_without_mimo(head: MtpConfig, target: PreTrainedConfig) -> object:
    return "true" if head.attention_bias and not is_mimo(target) else None


def not_true_for_mimo_alone(name: str) -> FindViolation:
    """Returns a function that finds a setting's value, which must be true for a mimo target and false for any other."""
    return lambda head, target: None if getattr(head, name) == is_mimo(target) else str(getattr(head, name)).lower()


def settings_of_mimo(head: MtpConfig, target: PreTrainedConfig) -> object:
    """Returns which settings of MiMo's MTP layer the head has, or None."""
    settings = [name for name in ("attention_bias", "zero_first_embedding", "prenorm_states") if getattr(head, name)]
    return f"one with {', '.join(settings)}" if settings else None


def mimo_target(head: HeadConfig, target: PreTrainedConfig) -> object:
    return target.model_type if is_mimo(target) else None


def unsupported_layer(head: HeadConfig, target: PreTrainedConfig) -> object:
    """Returns how the target's decoder layer differs from the head's, or None."""
    if target.model_type not in MODEL_CLASSES:
        return f"a {target.model_type}"
    if target.hidden_act != "silu":
        return f"one with hidden_act {target.hidden_act}"
    if getattr(target, "attention_bias", False) or getattr(target, "mlp_bias", False):
        return "one with biases"
    return None if sliding_window(target) is None else f"one with a sliding window of {sliding_window(target)} tokens"


def different_sizes(head: LayerConfig, target: PreTrainedConfig) -> object:
    """Returns the head's sizes if they differ from those of the target's layers, otherwise None."""
    dims = head_dims(head, target)
    ours = (dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim, dims.intermediate_size)
    theirs = (target.num_attention_heads, key_heads(target), head_dim(target), mlp_size(target))
    return None if ours == theirs else f"one with {ours} instead of {theirs}"


TRAIN_MTP = (
    "train head=mtp (for a mimo target with head.prenorm_states=true and head.zero_first_embedding=true, to serve it "
    "with vLLM)"
)

# fmt: off
LIMITS = (
    Limit("vllm", ("native_mtp",), "target.path", f"of a family with MTP modules ({', '.join(NATIVE_MTP)})",
          family_outside(NATIVE_MTP),
          "vLLM has no such class for others",
          "train head=mtp"),
    Limit("vllm", ("native_mtp",), "target.path", "a target with one MTP module", several_mtp_modules,
          "vLLM drafts each depth with a module of its own, but the head is the first module at all depths",
          "train head=mtp"),
    Limit("vllm", ("native_mtp",), "target.path", "a target that is not quantised", quantisation,
          "vLLM builds the module with the target's quantisation",
          "export for the target in bf16, or train head=eagle3, which keeps its own dtype"),
    Limit("vllm", ("mtp",), "target.path", "a target that is not quantised", quantisation,
          "vLLM builds the layers of this head with the target's quantisation",
          "export for the target in bf16, or train head=eagle3, which keeps its own dtype"),
    Limit("vllm", ("mtp",), "head.prenorm_states", "true for a mimo target and false for any other",
          not_true_for_mimo_alone("prenorm_states"),
          "vLLM passes a head the states before the final norm if the target is a mimo, otherwise those after it",
          "change it and train again"),
    Limit("vllm", ("mtp",), "head.zero_first_embedding", "true for a mimo target and false for any other",
          not_true_for_mimo_alone("zero_first_embedding"),
          "of the vLLM classes that serve this head, only MiMo's zeroes the embedding at position 0",
          "change it and train again"),
    Limit("vllm", ("mtp",), "head.attention_bias", "false for families other than mimo", biases_without_mimo,
          "of the vLLM classes that serve this head, only MiMo's has biases",
          "train without it"),
    Limit("vllm", ("mtp",), "head", "a layer with the mimo target's sizes (attention heads, key/value heads, "
                                    "head dim, intermediate size)", of_mimo(different_sizes),
          "vLLM builds MiMo's MTP layer from the target's config",
          "set head.num_attention_heads, head.num_key_value_heads and head.intermediate_size to the target's, and "
          "train again"),
    Limit("vllm", ("mtp",), "target.path", "a mimo target without a sliding window", of_mimo(window),
          "vLLM builds MiMo's MTP layer with the target's window, but the head was trained without one",
          "train head=draft_model"),
    Limit("vllm", ("eagle", "medusa"), "target.path", "of a family other than mimo", mimo_target,
          "vLLM passes the states before the target's final norm to the head, which reads those after it",
          "train head=mtp with head.prenorm_states=true and head.zero_first_embedding=true"),
    Limit("sglang", ("mtp",), "head.prenorm_states", "false", is_set("prenorm_states"),
          "SGLang passes the states after the target's final norm to a head",
          "set export.engine=vllm if the target is a MiMo, or train without it"),
    Limit("transformers", ("mtp",), "head", "without settings of MiMo's MTP layer", settings_of_mimo,
          "transformers builds the head from the target's own decoder layer",
          "set export.engine=vllm if the target is a MiMo, or train without them"),
    *(Limit("vllm", (name,), "target.path", "of a family whose layers can be captured",
            family_in(families),
            "vLLM's class does not return its residual streams",
            instead)
      for name in ("peagle", *WITH_STREAMS)
      for families, instead in (
          ({*WITHOUT_STREAMS_IN_VLLM} & {*STREAMS_OF_SGLANG.get(name, ())},
           f"set export.engine=sglang, or {TRAIN_MTP}"),
          (WITHOUT_STREAMS_IN_VLLM, TRAIN_MTP))
      if families),
    *(Limit("sglang", (name,), "target.path", "of a family whose layers can be captured",
            family_outside(families),
            f"SGLang has no class for it that returns residual streams to head {name}",
            instead)
      for name in WITH_STREAMS
      for families, instead in (
          ({*STREAMS_OF_SGLANG[name], *WITHOUT_STREAMS_IN_VLLM}, f"set export.engine=vllm, or {TRAIN_MTP}"),
          (STREAMS_OF_SGLANG[name], TRAIN_MTP))),
    Limit("sglang", ("dflash", "dspark"), "head.draft_vocab_size", "null", own_lm_head,
          "SGLang gives the head the target's lm_head",
          "set export.engine=vllm, or train without it"),
    Limit("sglang", ("eagle3",), "head.norm_before_residual", "false", is_set("norm_before_residual"),
          "SGLang takes the residual before the norm",
          "set export.engine=vllm, or train without it"),
    Limit("sglang", WITH_STREAMS, "head.capture_layers", "below the target's last layer", last_stream,
          "SGLang captures a stream at the input of the next layer",
          "set export.engine=vllm, or train with other layers"),
    Limit("sglang", WITH_STREAMS, "head.capture_layers", "above 0 (the embeddings)", embeddings_stream,
          "SGLang counts layers from 0 and has no id for the embeddings",
          "set export.engine=vllm, or train with other layers"),
    *(Limit(engine, ("eagle3",), "head.capture_layers", "two or more", single_stream,
            f"{name} applies fc only if it reduces the width of the state",
            "set export.engine=vllm, or train with more layers")
      for engine, name in (("sglang", "SGLang"), ("tensorrt_llm", "TensorRT-LLM"))),
    Limit("sglang", ("eagle3",), "head.capture_layers",
          f"a list that does not start with 1 for a {' or '.join(FROM_1_IN_SGLANG)} target",
          stream_1_counted_from_1,
          "for this family SGLang counts layers from 0 if the list starts with 1, and from 1 otherwise",
          "set export.engine=vllm, or train with other layers"),
    Limit("llama_cpp", ("eagle3",), "head.norm_output", "false", is_set("norm_output"),
          "llama.cpp feeds back the state before the final norm, whatever the file says",
          "set export.engine=vllm, or train without it"),
    Limit("llama_cpp", ("eagle3",), "head.fc_norm", "false", is_set("fc_norm"),
          "llama.cpp has no norm for each stream",
          "set export.engine=vllm, or train without it"),
    Limit("llama_cpp", ("eagle3",), "head.capture_layers", "three", other_than_three_streams,
          "llama.cpp reads exactly three",
          "set export.engine=vllm, or train with three"),
    Limit("llama_cpp", WITH_STREAMS, "head.capture_layers", "below the target's last layer", last_stream,
          "llama.cpp captures a stream at the input of the next layer",
          "set export.engine=vllm, or train with other layers"),
    Limit("llama_cpp", BLOCK_DRAFTERS, "head.causal", "all or none if some layers slide and others do not",
          causal_in_some,
          "llama.cpp has one setting for all layers",
          "set export.engine=vllm, or train with another"),
    Limit("llama_cpp", WITH_STREAMS, "target.path", f"one of {', '.join(STREAMS_OF_LLAMA_CPP)}",
          family_outside(STREAMS_OF_LLAMA_CPP),
          "of other families llama.cpp returns no residual streams, or none has been compared with ours",
          "set export.engine=vllm, or train head=draft_model"),
    Limit("llama_cpp", (*WITH_STREAMS, "draft_model"), "target.path", "a target without a sliding window", window,
          "its window in llama.cpp has not been compared with ours",
          "set export.engine=vllm"),
    Limit("llama_cpp", (*WITH_STREAMS, "draft_model"), "target.path", "a target with hidden_act=silu", other_activation,
          "llama.cpp computes silu in every family that is known here",
          "set export.engine=vllm"),
    Limit("llama_cpp", (*WITH_STREAMS, "draft_model"), "target.path",
          "a target with attention_bias=false, unless it is a Llama", biases_beside_llama,
          "llama.cpp's classes of other families do not load these biases",
          "set export.engine=vllm"),
    Limit("llama_cpp", (*WITH_STREAMS, "draft_model"), "target.path",
          "a target with norm_topk_prob=true", unnormed_experts,
          "llama.cpp makes the weights of a token's experts add up to 1, whatever the model says",
          "set export.engine=vllm"),
    Limit("llama_cpp", ("dflash2",), "head.selector_top_k", "k with k (k + 1) of at most the target's hidden size",
          many_candidates,
          "llama.cpp passes the candidates and the scores of all pairs where a state would be",
          "set export.engine=vllm, or train with fewer"),
    Limit("llama_cpp", ("draft_model",), "head.init_from", f"one of {', '.join(ARCHITECTURE_OF)} without a window, "
          "and with unscaled RoPE unless it is a Llama or Mistral", of_draft_model(unknown_draft_model),
          "the names and RoPE of other models in llama.cpp are not known here",
          "convert the export of export.engine=vllm with llama.cpp's convert_hf_to_gguf.py"),
    Limit("tensorrt_llm", ("eagle3",), "head.norm_before_residual", "false", is_set("norm_before_residual"),
          "TensorRT-LLM takes the residual before the norm",
          "set export.engine=vllm, or train without it"),
    Limit("tensorrt_llm", ("eagle3",), "head.capture_layers", "above 0 (the embeddings)", embeddings_stream,
          "TensorRT-LLM counts layers from 0 and has no id for the embeddings",
          "set export.engine=vllm, or train with other layers"),
    *(Limit("openvino", ("eagle3",), f"head.{setting}", "false", is_set(setting),
            "optimum's class of EAGLE-3 heads does not have it, and would leave it out without an error",
            "set export.engine=vllm, or train without it")
      for setting in ("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output")),
    Limit("openvino", ("eagle3",), "head.capture_layers", "three", other_than_three_streams,
          "OpenVINO reads exactly three",
          "set export.engine=vllm, or train with three"),
    Limit("openvino", ("eagle3", "dflash"), "head.capture_layers", "above 0 (the embeddings)", embeddings_stream,
          "OpenVINO counts layers from 0 by their outputs and has no id for the embeddings",
          "set export.engine=vllm, or train with other layers"),
    Limit("openvino", ("dflash",), "head.capture_layers", "below the target's last layer", last_stream,
          "optimum takes the state after the final norm for the stream after the last layer",
          "set export.engine=vllm, or train with other layers"),
    *(Limit(engine, ("dflash",), "head.sample_from_anchor", "false", is_set("sample_from_anchor"),
            f"{name}'s class drafts nothing with the newest token",
            "set export.engine=llama_cpp, or train without it")
      for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang"), ("openvino", "OpenVINO"))),
    Limit("openvino", ("dflash",), "head.causal", "none", causal_layers,
          "in OpenVINO's class a token always sees its whole block",
          "set export.engine=vllm, or train without it"),
    Limit("openvino", ("dflash",), "head.draft_vocab_size", "null", own_lm_head,
          "OpenVINO gives the head the target's lm_head",
          "set export.engine=vllm, or train without it"),
    Limit("openvino", ("eagle3", "dflash", "draft_model"), "target.path",
          f"one of {', '.join(FAMILIES_OF_OPENVINO)}", family_outside(FAMILIES_OF_OPENVINO),
          "in OpenVINO no other family has been compared with ours",
          "set export.engine=vllm"),
    Limit("openvino", ("eagle3", "dflash", "draft_model"), "target.path", "a target without a sliding window", window,
          "its window in OpenVINO has not been compared with ours",
          "set export.engine=vllm"),
    Limit("openvino", ("draft_model",), "head.init_from", f"one of {', '.join(FAMILIES_OF_OPENVINO)}",
          of_draft_model(family_outside(FAMILIES_OF_OPENVINO)),
          "in OpenVINO no other family has been compared with ours",
          "set export.engine=vllm, or choose another model"),
    Limit("openvino", ("draft_model",), "head.init_from", "a model without a sliding window", of_draft_model(window),
          "its window in OpenVINO has not been compared with ours",
          "set export.engine=vllm, or choose another model"),
    Limit("transformers", ("mtp",), "target.path", "a Llama or Mistral with full attention, SiLU and no "
                                                   "biases", unsupported_layer,
          "transformers builds the head from the target's own decoder layer",
          "set export.engine=vllm"),
    Limit("transformers", ("mtp",), "target.path", "a target that is not quantised", quantisation,
          "the head's layer would have to be quantised like the target's",
          "export for the target in bf16"),
    Limit("transformers", ("mtp",), "head", "a layer with the target's sizes (attention heads, key/value heads, "
                                            "head dim, intermediate size)", different_sizes,
          "transformers builds the head from the target's own decoder layer",
          "set export.engine=vllm, or train again with these sizes"),
)
# fmt: on
"""Limits are checked in this order."""


def check_servable(engine: str, head: HeadConfig, target: PreTrainedConfig) -> None:
    """Check that an engine can serve a head with a target.

    Raises:
        UserError: a limit is violated; the message names the first such limit.
    """
    for limit in LIMITS:
        violation = limit.find_violation(head, target) if limit.engine == engine and head.name in limit.heads else None
        if violation is not None:
            raise UserError(
                f"{limit.setting}: must be {limit.must_be} to export head {head.name} for {engine}, but is "
                f"{violation}: {limit.reason}; {limit.instead}"
            )
