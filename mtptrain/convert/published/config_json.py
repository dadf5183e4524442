"""Reads the config.json of a published head by a whitelist.

`RULES` lists every key that mtptrain understands, by kind of head, with the rule that its value must keep. Any other
key is refused by name, because it may change how the head drafts. Keys of `dflash_config`, `eagle_config`,
`rope_parameters` and `rope_scaling` are written with a dot. A key whose value is null counts as absent.
"""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig

from mtptrain.convert.published.speculators import engine_config
from mtptrain.heads.dflash import FULL, SLIDING
from mtptrain.heads.dflash2 import MAX_CANDIDATES, MAX_KERNEL_SIZE
from mtptrain.settings.heads import MAX_DEPTHS, MAX_LAYERS, MAX_SIZE
from mtptrain.target.checkpoint_check import MODEL_OPT_QUANTISATION
from mtptrain.target.families import head_rope_parameters, norm_eps
from mtptrain.utils.errors import UserError, error_summary
from mtptrain.utils.files import read_json

Config = dict[str, Any]
Rule = Callable[[Any, Config, PreTrainedConfig], str | None]
"""Given a value, the whole config and the target, returns what the value must be instead, or None if it is honoured."""

SECTIONS = ("dflash_config", "eagle_config", "rope_parameters", "rope_scaling")
"""Keys that hold further keys."""
ROPE_SECTIONS = SECTIONS[2:]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FROM_1_IN_SGLANG = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""Families in which SGLang reads id k as the stream after k layers, as vLLM does.

If the first id is 1, it reads them as in other families: id k is then the stream after k + 1 layers. Source:
`set_eagle3_layers_to_capture` of their classes.
"""
SHOWN_CHARACTERS = 80
"""Maximum number of characters that an error quotes from a value."""


def shown(value: object) -> str:
    """Returns a value of config.json as it is written there, but not more than its beginning."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def anything(value: Any, config: Config, target: PreTrainedConfig) -> None:
    """Accepts all values: the key changes nothing, or its value is read or compared elsewhere."""


def only(*allowed: object, reason: str = "as in our heads") -> Rule:
    """Accepts these values. The error for another gives the reason, if there is one."""
    wanted = " or ".join(shown(value) for value in allowed) + (f", {reason}" if reason else "")
    kinds = [(isinstance(value, bool), value) for value in allowed]  # true is not 1.0
    return lambda value, config, target: None if (isinstance(value, bool), value) in kinds else wanted


def of_target(name: str) -> Rule:
    """Accepts the value that the target has under this name."""

    def rule(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
        return None if value == getattr(target, name) else f"{getattr(target, name)} for this target"

    return rule


def is_whole_number(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def between(least: int, most: int) -> Rule:
    """Accepts whole numbers from `least` to `most`, the bounds of the setting of our heads."""

    def rule(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
        return None if is_whole_number(value, least) and value <= most else f"a whole number from {least} to {most:,}"

    return rule


def number(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return None if is_number else "a number above 0"


def token_id(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    """Accepts the id of a token of the target."""
    is_token = is_whole_number(value) and value < target.vocab_size
    return None if is_token else f"within 0..{target.vocab_size - 1}, the target's vocabulary"


def layer_ids(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    # SGLang counts the embeddings as -1.
    is_list = isinstance(value, list) and all(is_whole_number(each, least=-1) for each in value)
    return None if is_list else "a list of layer ids"


def in_each_layer(*types: str) -> Rule:
    """Accepts lists whose entries are all of these types of attention."""

    def rule(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
        is_known = isinstance(value, list) and set(map(str, value)) <= set(types)
        return None if is_known else f"{' or '.join(types)} in each layer, as in our heads"

    return rule


def only_with_types(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    """Accepts a window that is switched on only with `layer_types`: without, classes guess which layers slide."""
    return None if value is False or (value is True and "layer_types" in config) else "false, or stand with layer_types"


def unused_window(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    """Accepts the size of a window that no layer has."""
    is_unused = config.get("use_sliding_window") is False or config.get("layer_types") is not None
    return None if is_unused else "null or switched off by use_sliding_window=false, because our heads have no window"


def same_as(other: str) -> Rule:
    """Accepts the value of another key that means the same, or any value if the config has no such key."""

    def rule(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
        there = config.get(other)
        return None if there in (None, value) else f"the same as {other}, {shown(there)}"

    return rule


def same_scaling(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    """Accepts the older key of `rope_parameters` if it says the same, but for the theta that it does not have."""
    scaling, parameters = (
        {name.replace("rope_type", "type"): inner for name, inner in each.items() if name != "rope_theta"}
        for each in (value if isinstance(value, dict) else {}, config.get("rope_parameters") or {})
    )
    is_same = "rope_parameters" not in config or scaling == parameters
    return None if is_same else "the same as rope_parameters, but for rope_theta"


def num_captured(value: Any, config: Config, target: PreTrainedConfig) -> str | None:
    """Accepts the number of captured layers, which is 3 if no ids are given."""
    ids = captured_ids(config)
    if not isinstance(ids, list | None):
        return None  # `layer_ids` refuses it by its own name
    count = 3 if ids is None else len(ids)
    return None if value == count else f"{count}, the number of captured layers"


size = between(1, MAX_SIZE)
HARMLESS = dict.fromkeys(
    (
        *("architectures", "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tie_word_embeddings", "use_cache"),
        *("initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "return_dict", "problem_type"),
        *("is_encoder_decoder", "is_decoder", "output_attentions", "output_hidden_states", "id2label", "label2id"),
        *("chunk_size_feed_forward", "_attn_implementation", "attn_implementation", "base_model_name_or_path"),
        *("gradient_checkpointing", "_attn_implementation_autoset", "unsloth_version", "_torchspec_version"),
        "max_position_embeddings",  # the head uses the target's positions
        "has_no_defaults_at_init",
        "max_window_layers",  # counts only for windows without layer_types, which are refused
    ),
    anything,
)
"""Keys that do not change how a head drafts, or that the class or the tensors of the head make redundant."""
ROPE_NAMES = ("rope_theta", "rope_parameters", "rope_scaling")
ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "mscale", "mscale_all_dim"),
)
BOOLEAN = only(True, False, reason="")
ROPE = {
    **dict.fromkeys(("rope_parameters", "original_max_position_embeddings"), anything),
    "rope_scaling": same_scaling,
    **dict.fromkeys((f"{section}.{name}" for section in ROPE_SECTIONS for name in ("rope_type", "type")), anything),
    **dict.fromkeys((f"{section}.truncate" for section in ROPE_SECTIONS), BOOLEAN),
    **dict.fromkeys((f"{section}.{name}" for section in ROPE_SECTIONS for name in ROPE_NUMBERS), number),
    "rope_theta": number,
    **dict.fromkeys(
        (*(f"{section}.partial_rotary_factor" for section in ROPE_SECTIONS), "partial_rotary_factor"),
        only(1.0, reason="because our heads rotate whole attention heads"),
    ),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), only(True, reason="because our heads rotate halves")),
    **dict.fromkeys(
        ("rope_interleave", "rope_interleaved", "rope_parameters.interleaved", "rope_scaling.interleaved"),
        only(False, reason="because our heads rotate halves, not interleaved pairs"),
    ),
}
"""Keys of the rotary embedding. `warn_of_other_arithmetic` compares the accepted ones with the target's."""
LAYER = {
    **HARMLESS,
    **ROPE,
    "vocab_size": of_target("vocab_size"),
    "hidden_size": of_target("hidden_size"),
    "target_hidden_size": of_target("hidden_size"),
    "num_target_layers": of_target("num_hidden_layers"),
    "num_hidden_layers": only(1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"), size),
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias"), anything),  # the tensors tell
    "hidden_act": only("silu"),
    "rms_norm_eps": number,  # `warn_of_other_arithmetic` compares it
    "logit_scale": only(1.0),
    "is_causal": only(True),
    "layer_types": in_each_layer(FULL),
    "use_sliding_window": only(False, reason="because our heads have no window"),
    "sliding_window": unused_window,
    "use_mrope": only(False, reason="because our heads rotate by one position"),
}
"""Keys of heads with decoder layers."""
NATIVE = {
    **LAYER,
    "num_hidden_layers": of_target("num_hidden_layers"),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), only(1)),
    "model_type": only(
        *("llama", "mistral", "qwen2", "qwen3", "mimo"),
        reason="a family whose MTP layer feeds back the state after its norm",
    ),
    "mtp_hidden_states_first": only(False, reason="because eh_proj of head mtp reads the embedding first"),
}
"""Keys of checkpoints that hold an MTP layer behind the layers of a whole model."""
MODEL_OPT_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys that ModelOpt writes, with the values of an EAGLE-3 head, which are its defaults."""
RULES: dict[str, dict[str, Rule]] = {
    "native": NATIVE,
    "mtp": {
        **LAYER,
        "num_nextn_predict_layers": only(1),
        **dict.fromkeys(
            ("n_routed_experts", "qk_nope_head_dim", "qk_rope_head_dim"),
            only(0, reason="because head mtp has neither experts nor latent attention"),
        ),
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_freq", "n_group"), anything),  # without experts, unused
    },
    "eagle": LAYER | {"draft_vocab_size": of_target("vocab_size")},
    "eagle3": {
        **LAYER,
        "draft_vocab_size": size,
        **dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), token_id),
        "num_aux_hidden_states": num_captured,
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "use_aux_norm"), BOOLEAN),
        LAYER_IDS: layer_ids,
        "eagle_config": anything,
        f"eagle_config.{LAYER_IDS}": same_as(LAYER_IDS),
        "eagle_config.norm_before_fc": BOOLEAN,
        **{
            f"{section}{name}": only(value)
            for section in ("", "eagle_config.")
            for name, value in MODEL_OPT_EAGLE3.items()
        },
        "embed_requires_grad": anything,  # the embeddings in the file tell
        "eagle_config.parallel_draft_heads_num_layers": anything,  # without parallel drafts, unused
        **dict.fromkeys(("eagle_config.eh_proj_before_attn", "eagle_config.eh_proj_bias"), only(False)),
    },
    "dflash": {
        **LAYER,
        "num_hidden_layers": between(1, MAX_LAYERS),
        "block_size": between(2, MAX_DEPTHS + 1),  # the newest token and the drafts
        "draft_vocab_size": size,
        **dict.fromkeys(("is_causal", "dflash_config.causal", "dflash_config.use_swa"), BOOLEAN),
        "use_sliding_window": only_with_types,
        **dict.fromkeys(
            ("sample_from_anchor", "dflash_config.sample_from_anchor", "dflash_config.shift_label"),
            only(False, reason="because heads of this class draft nothing with the first token in engines"),
        ),
        "layer_types": in_each_layer(FULL, SLIDING),
        **dict.fromkeys(("sliding_window", "dflash_config.swa_window_size"), size),
        "max_anchors": anything,  # the number of blocks per document in training
        "dflash_config": anything,
        "dflash_config.block_size": same_as("block_size"),
        "dflash_config.mask_token_id": token_id,
        "dflash_config.target_layer_ids": layer_ids,
        "dflash_config.attention_value_scale": only(1.0),
        "dflash_config.output_multiplier": only(1.0),
        "dflash_config.input_embedding_scale": only(1.0),
        "dflash_config.final_logit_softcapping": only(0.0),
    },
    "medusa": {
        **HARMLESS,
        **dict.fromkeys(("vocab_size", "truncated_vocab_size"), of_target("vocab_size")),
        "hidden_size": of_target("hidden_size"),
        "logit_scale": only(1.0),
        **dict.fromkeys(("num_heads", "num_hidden_layers"), between(1, MAX_DEPTHS)),  # compared with the tensors
        # The tensors tell these (FasterDecoding's published heads have more tensors than their config says), or they
        # shape trees, which vLLM does not draft.
        **dict.fromkeys(("medusa_num_heads", "medusa_num_layers"), anything),
        **dict.fromkeys(
            ("medusa_fc_bias", "original_lm_head", "max_paths", "topk", "max_seq_len", "version"), anything
        ),
    },
}
"""The rules of each kind of head. `eagle3` includes P-EAGLE; `native` are the MTP layers of whole models."""
DSPARK_NESTED = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
"""Keys of head `dspark` that SpecForge writes in `dflash_config`, DeepSpec at the top level."""
RULES["dspark"] = RULES["dflash"] | {
    "block_size": between(1, MAX_DEPTHS),  # the drafts
    "markov_rank": size,
    "markov_head_type": only("vanilla"),
    **dict.fromkeys(
        ("enable_confidence_head", "confidence_head_with_markov"), only(True, reason="because head dspark has one")
    ),
    **{f"dflash_config.{name}": same_as(name) for name in DSPARK_NESTED},
    "dflash_config.projector_type": only("dspark"),
    # These shape its training: the number of blocks per document, and the weight of the confidence's loss.
    **dict.fromkeys(("num_anchors", "dflash_config.confidence_head_alpha"), anything),
    "dflash_config.attention_mode": only("gqa", "mha"),  # the numbers of heads tell
    "sample_from_anchor": BOOLEAN,
    "dflash_config.sample_from_anchor": same_as("sample_from_anchor"),
    "target_layer_ids": same_as("dflash_config.target_layer_ids"),
    "mask_token_id": same_as("dflash_config.mask_token_id"),
}
WITHOUT_MARKOV = "dspark without its heads"
RULES[WITHOUT_MARKOV] = RULES["dspark"] | {
    "markov_rank": only(0),
    **dict.fromkeys(
        ("enable_confidence_head", "confidence_head_with_markov"),
        only(False, reason="because a head with markov_rank 0 is read as dflash, which has no confidence head"),
    ),
}
"""DeepSpec's DFlash is DSpark's class with a Markov head of rank 0. It is read as head `dflash`."""
DSPARK_KINDS = ("dspark", WITHOUT_MARKOV)
"""Kinds with DSpark's class, whose keys may stand at either place and whose block size counts the drafts."""
RULES["dflash2"] = RULES["dflash"] | {
    "dflash_config.conv_kernel_size": between(1, MAX_KERNEL_SIZE),
    "dflash_config.conv_group_size": size,
    "dflash_config.selector_rank": size,
    "dflash_config.selector_top_k": between(1, MAX_CANDIDATES),
    "draft_vocab_size": of_target("vocab_size"),
}


def read_config(directory: Path, kind: str, target_config: PreTrainedConfig) -> Config:
    """Returns the config of a head of this kind, with the keys of sections as `section.key` and without nulls.

    Raises:
        UserError: a key is not in the whitelist, or its value cannot be honoured.
    """
    path = directory / "config.json"
    config: Config = {}
    for key, value in engine_config(directory).items():
        config[key] = value
        if key in SECTIONS and isinstance(value, dict):
            config |= {f"{key}.{part}": inner for part, inner in value.items()}
    config = {key: value for key, value in config.items() if value is not None}
    _refuse_quantisation(directory / MODEL_OPT_QUANTISATION)
    is_dspark = kind in DSPARK_KINDS
    nested = ["block_size", "sample_from_anchor", *(DSPARK_NESTED if is_dspark else ())]
    for key in (*(f"dflash_config.{name}" for name in nested), f"eagle_config.{LAYER_IDS}"):
        if key in config:  # the same as a key at the top level, whose rule it must also keep
            config.setdefault(key.partition(".")[2], config[key])
    for key in ("target_layer_ids", "mask_token_id") if is_dspark else ():
        if key in config:  # likewise, and the section's rule holds for both
            config.setdefault(f"dflash_config.{key}", config[key])
    if unknown := [key for key in config if key not in RULES[kind]]:
        found = ", ".join(f"{key}={shown(config[key])}" for key in unknown)
        raise UserError(
            f"{path}: must hold only settings that mtptrain understands, because others may change what the head "
            f"drafts, but has {found}; choose another head, or remove {', '.join(unknown)} from a copy of the file if "
            "you know that nothing changes"
        )
    for key, value in config.items():
        wanted = RULES[kind][key](value, config, target_config)
        if wanted is not None:
            raise UserError(f"{path}: {key} must be {wanted}, but is {shown(value)}; choose another head")
        if key in SECTIONS and not isinstance(value, dict):
            raise UserError(f"{path}: {key} must hold settings, but is {shown(value)}; download the head again")
    return config


def captured_ids(config: Config) -> list[int] | None:
    """Returns the layer ids of an EAGLE-3 head, or None if it has the engines' default layers."""
    return config.get(LAYER_IDS) or None


def rope_and_eps(
    path: Path, config: Config, target_config: PreTrainedConfig, theta: float
) -> dict[str, tuple[object, object]]:
    """Returns `rope_parameters` and `rms_norm_eps`, each as a pair of the head's value and the target's.

    The pairs can be compared: defaults are filled in, and eps is rounded to fp32.

    Args:
        path: the head's config.json, for error messages.
        config: the head's config.
        target_config: the target's config.
        theta: the engines' rope_theta for a config without one.

    Raises:
        UserError: the head's RoPE parameters are not complete.
    """
    names = ("original_max_position_embeddings", "max_position_embeddings", "rms_norm_eps", *ROPE_NAMES)
    given = deepcopy({name: config[name] for name in names if name in config})  # transformers adds to its sections
    if "rope_parameters" in given:
        given.pop("rope_scaling", None)  # which says the same, and may lack the theta
    try:
        own = LlamaConfig.from_dict({"rope_theta": theta} | given)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: the RoPE parameters must be readable by transformers, which reports {error_summary(error)}; "
            "download the head again"
        ) from error
    own_rope, rope = (
        {name: value for name, value in head_rope_parameters(each).items() if name != "type"}
        for each in (own, target_config)
    )
    # A target's GGUF file holds its eps in fp32, so compare both in fp32; str gives 1e-06 instead of 9.99999997e-07.
    own_eps, eps = (float(str(np.float32(each))) for each in (own.rms_norm_eps, norm_eps(target_config)))
    return {"rope_parameters": (own_rope, rope), "rms_norm_eps": (own_eps, eps)}


def _refuse_quantisation(path: Path) -> None:
    """Refuse ModelOpt's file beside config.json if it says that weights or cache are quantised."""
    if path.is_file():
        algorithms = read_json(path, "copy or download it again", ["quantization"])["quantization"]
        if algorithms is not None and not (isinstance(algorithms, dict) and not any(algorithms.values())):
            raise UserError(
                f"{path}: must name no quantisation, because our heads are not quantised, but has {shown(algorithms)}; "
                "choose another head"
            )
