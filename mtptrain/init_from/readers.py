"""Reads each kind of published head: the settings of our head that fit it, and its tensors under our names.

These are functions here, not methods of the heads: four of them serve eight heads, and the heads' files would have to
import what the config.json of six projects means.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedConfig

from mtptrain.engines.exports import FROM_1_IN_SGLANG, LAYER_IDS, SERVING
from mtptrain.heads import HEADS
from mtptrain.heads.base import Tensors
from mtptrain.heads.dflash import FULL, SLIDING
from mtptrain.heads.dflash2 import published_settings
from mtptrain.heads.eagle3 import can_capture
from mtptrain.heads.mtp import swap_halves
from mtptrain.init_from.config_json import PLAIN_ARITHMETIC, SPECULATORS, ConfigJson
from mtptrain.settings.heads import CausalLayers, Dflash2Config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

Settings = dict[str, list[Any]]
"""For each setting of a head, the values that fit its weights, most likely first."""
ROUNDING = 0.01
"""A relative difference of a row up to this one passes as rounding to another dtype."""
ONE_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
MTP_NAMES = {
    **dict.fromkeys(("fc.weight", "input_proj.weight"), "eh_proj.weight"),
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    **dict.fromkeys(("final_layernorm.weight", "shared_head.norm.weight", "post_norm.weight"), "norm.weight"),
}
"""Our names for those of vLLM's class, of MiMo's layer and of layers in DeepSeek's layout."""
JOINED = "layers.0.self_attn.qkv_proj.weight"
"""The projections that vLLM's class has in one tensor."""
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "mimo")
"""Families whose MTP layer, if it is dense, is a Llama layer that feeds back the state after its norm."""
OLDER_NORMS = {
    f"aux_norm_{name}.weight": f"fc_norm.{index}.weight" for index, name in enumerate(("low", "mid", "high"))
}
"""Names that SGLang still reads beside `use_aux_norm`."""
MODEL_OPT_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys that ModelOpt writes, with the values of an EAGLE-3 head, which are its defaults."""
FASTER_DECODING = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
"""FasterDecoding, the project of Medusa's authors, names layer j of depth i `i.j.linear`, and the lm_head after it
`i.j`."""
DSPARK_CLASSES = ("Qwen3DSparkModel", "DSparkDraftModel", "dspark")
"""Classes whose block size counts the drafts alone, and whose keys may stand at the top level (DeepSpec) or in
`dflash_config` (SpecForge). DeepSpec's DFlash has this class too, with a Markov head of rank 0."""
PLAIN_BLOCKS = {
    **dict.fromkeys(("attention_value_scale", "output_multiplier", "input_embedding_scale"), 1.0),
    "final_logit_softcapping": 0.0,
    "use_aux_hidden_state": True,
}
"""Keys for what block drafters may compute otherwise, with the values of ours."""


def read_mtp(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> tuple[Settings, Tensors]:
    if config.is_of_model:
        config.must_be({"num_hidden_layers": target.config.num_hidden_layers}, "for this target")
        config.must_be({"mtp_hidden_states_first": False}, "because eh_proj of head mtp reads the embedding first")
        if config.take("model_type") not in (None, *LIKE_LLAMA):
            config.refuse("model_type", f"one of {', '.join(LIKE_LLAMA)}, whose MTP layers are like head mtp")
    else:
        # Without these, vLLM's class has neither experts nor latent attention.
        config.must_be({"n_routed_experts": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "num_hidden_layers": 1})
        config.describes("first_k_dense_replace", "moe_layer_freq", "n_group")
    config.must_be({"num_nextn_predict_layers": 1, "num_mtp_layers": 1})
    settings, is_mimo = full_layers(name, config, tensors, target), "input_proj.weight" in tensors
    if (joined := tensors.pop(JOINED, None)) is not None:
        heads, kv_heads = settings["num_attention_heads"][0], settings["num_key_value_heads"][0]
        head_dim = len(joined) // (heads + 2 * kv_heads)
        parts = joined.tensor_split([heads * head_dim, (heads + kv_heads) * head_dim])
        tensors |= {JOINED.replace("qkv", each): part for each, part in zip("qkv", parts, strict=True)}
    tensors = renamed(tensors, lambda each: MTP_NAMES.get(own := ONE_LAYER.sub("", each), own))
    if is_mimo:
        tensors["eh_proj.weight"] = swap_halves(tensors["eh_proj.weight"])
        has_biases = any(bool(tensor.any()) for each, tensor in tensors.items() if each.endswith(".bias"))
        # For a MiMo checkpoint, these are the settings of vLLM's MTP layer. An export for SGLang does not say them all.
        settings["attention_bias"] = [True] if has_biases else [False, True]
        settings["zero_first_embedding"] = [True] if config.is_of_model else [False, True]
        settings["prenorm_states"] = [config.is_of_model]
    return settings, tensors


def read_eagle(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> tuple[Settings, Tensors]:
    config.must_be({"num_hidden_layers": 1})
    config.must_be({"draft_vocab_size": target.config.vocab_size}, "for this target")
    return full_layers(name, config, tensors, target), renamed(tensors, lambda each: ONE_LAYER.sub("", each))


def read_eagle3(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> tuple[Settings, Tensors]:
    """Reads P-EAGLE too, which has a `mask_hidden`."""
    config.must_be({"num_hidden_layers": 1})
    config.must_be({**MODEL_OPT_EAGLE3, "eh_proj_before_attn": False, "eh_proj_bias": False})
    tensors = renamed(tensors, lambda each: OLDER_NORMS.get(own := ONE_LAYER.sub("", each), own))
    if "d2t" in tensors and len(tensors["d2t"]) == target.config.vocab_size and not tensors["d2t"].any():
        tensors.pop("d2t")  # it maps the whole vocabulary to itself
    settings: Settings = full_layers(name, config, tensors, target) | {
        "draft_vocab_size": own_vocabulary(config, tensors, target),
        "norm_output": [bool(config.flag("norm_output"))],
        "norm_before_residual": [bool(config.flag("norm_before_residual"))],
        "capture_layers": eagle3_layers(config, target.config),
    }
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        settings[flag] = [has_norm := tensor in tensors]
        config.must_be({flag: has_norm}, f"as {tensor} is {'there' if has_norm else 'absent'}")
    if (mask := tensors.get("mask_hidden")) is not None:
        settings["mask_token_id"] = [config.whole("mask_token_id", least=0)]
        if mask.numel() % target.config.hidden_size == 0:
            tensors["mask_hidden"] = mask.reshape(-1, target.config.hidden_size)
    elif config.take("mask_token_id") is not None:
        config.refuse("mask_token_id", "left out, because the head has no mask_hidden")
    return settings, tensors


def read_medusa(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> tuple[Settings, Tensors]:
    """Reads vLLM's layout and FasterDecoding's. The lm_heads of the depths are only compared with the target's."""
    vocab_size = target.config.vocab_size
    config.must_be(target_sizes(target.config) | {"truncated_vocab_size": vocab_size}, "for this target")
    config.must_be({"logit_scale": 1.0})
    # The tensors tell these (FasterDecoding's published heads have more tensors than their config says), or they shape
    # trees, which vLLM does not draft.
    config.describes("medusa_num_heads", "medusa_num_layers", "medusa_fc_bias", "original_lm_head", "version")
    config.describes("max_paths", "topk", "max_seq_len")
    tensors = renamed(tensors, _medusa_name)
    layers = [match for each in tensors if (match := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", each))]
    num_depths, num_layers = (len({match[group] for match in layers}) for group in (1, 2))
    config.must_be({"num_heads": num_depths, "num_hidden_layers": num_layers}, "as many as have tensors")
    for each, tensor in sorted(tensors.items()):
        if each.startswith("lm_head") and len(tensor) != vocab_size:
            raise UserError(
                f"head.init_from: {each} of {config.path.parent} must have {vocab_size} rows, the target's vocabulary, "
                f"but has {len(tensor)}; the head belongs to another target; set target.path to that target"
            )
    has_biases = any(each.startswith("blocks.") and each.endswith(".bias") for each in tensors)
    return {"ttt_steps": [num_depths], "num_layers": [num_layers], "fc_bias": [has_biases]}, tensors


def _medusa_name(name: str) -> str:
    """Returns the name that vLLM and our own heads use for a tensor."""
    if (match := FASTER_DECODING.match(name)) is not None:
        depth, layer, is_layer, kind = match.groups()
        name = f"blocks.{depth}.layers.{layer}.{kind}" if is_layer else f"lm_heads.{depth}.{kind}"
    return name.removeprefix("medusa_heads.")


def read_block_drafter(
    name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles
) -> tuple[Settings, Tensors]:
    """Reads `dflash`, `dspark` and `dflash2`, and as `dflash` also a head in DSpark's class without its additions."""
    settings = layer_sizes(name, config, tensors, target)
    # 1. The layout of a block. DSpark's blocks have only rows that draft, if the newest token does.
    is_dspark = name == "dspark" or config.architecture in DSPARK_CLASSES
    if not is_dspark:
        why = "because engines draft nothing with the newest token in this class"
        config.must_be({"sample_from_anchor": False}, why)
    config.must_be({"projector_type": "dspark" if is_dspark else name}, f"for a {config.architecture}")
    is_anchor_first, least = config.flag("sample_from_anchor"), 1 if is_dspark else 2
    settings["ttt_steps"] = [config.whole("block_size", least=least) + 1 - least]
    settings["sample_from_anchor"] = [is_dspark if is_anchor_first is None else is_anchor_first]
    settings["mask_token_id"] = [config.whole("mask_token_id", least=0)]
    # 2. The layers. Here engines number their outputs from 0: id k is the stream after k + 1 decoder layers.
    layers = [layer + 1 for layer in config.layer_ids("target_layer_ids")]
    config.must_be({LAYER_IDS: layers}, "as target_layer_ids says, counted from 1")
    settings["capture_layers"] = [layers]
    settings["num_layers"] = [config.whole("num_hidden_layers")]
    settings |= {setting: [value] for setting, value in block_attention(config).items()}
    # 3. What chooses a draft.
    if name == "dflash2":
        config.must_be({"draft_vocab_size": target.config.vocab_size}, "for this target")
        settings["draft_vocab_size"] = [None]
        settings |= {key: [config.whole(key)] for key in published_settings(Dflash2Config())}
    else:
        settings["draft_vocab_size"] = own_vocabulary(config, tensors, target)
    if is_dspark:
        confidence = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), name == "dspark")
        config.must_be(confidence | {"markov_head_type": "vanilla"}, f"as in head {name}")
        rank = config.whole("markov_rank", least=0)
        settings |= {"markov_rank": [rank]} if name == "dspark" else {}
        if config.take("attention_mode") not in (None, "gqa", "mha"):  # the numbers of heads tell which
            config.refuse("attention_mode", "gqa or mha")
    config.must_be(PLAIN_BLOCKS)
    # ModelOpt's names of DSpark's tensors.
    tensors = renamed(tensors, lambda each: re.sub(r"^confidence_proj\b", "confidence_head.proj", each))
    return settings, renamed(tensors, lambda each: re.sub(r"^(?=markov_w[12]\b)", "markov_head.", each))


READERS: dict[str, Callable[[str, ConfigJson, Tensors, TargetFiles], tuple[Settings, Tensors]]] = {
    "mtp": read_mtp,
    "eagle": read_eagle,
    **dict.fromkeys(("eagle3", "peagle"), read_eagle3),
    "medusa": read_medusa,
    **dict.fromkeys(("dflash", "dspark", "dflash2"), read_block_drafter),
}


def renamed(tensors: Tensors, new_name: Callable[[str], str]) -> Tensors:
    """Returns the tensors under the names that a function gives them, and refuses two that get one name."""
    old_names: dict[str, str] = {}
    for name in tensors:
        other = old_names.setdefault(new_name(name), name)
        if other != name:
            raise UserError(
                f"head.init_from: a tensor must have one name, but {other} and {name} are both {new_name(name)}; "
                "remove the one that the engine does not read"
            )
    return {new: tensors[old] for new, old in old_names.items()}


def target_sizes(target: PreTrainedConfig) -> dict[str, object]:
    """Returns the keys of a head's config.json whose values are the target's."""
    sizes = dict.fromkeys(("hidden_size", "target_hidden_size"), target.hidden_size)
    return {**sizes, "vocab_size": target.vocab_size, "num_target_layers": target.num_hidden_layers}


def layer_sizes(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> Settings:
    """Returns the sizes of a head's layers, and refuses layers that compute otherwise than ours."""
    config.must_be(target_sizes(target.config), "for this target")
    config.must_be(PLAIN_ARITHMETIC)
    config.has_rope()
    if "lm_head.weight" not in tensors and not target.config.tie_word_embeddings and not config.is_of_model:
        config.must_be({"tie_word_embeddings": False}, "because the target's lm_head, which the head uses, is not tied")
    for key, layer in (("attention_bias", "q_proj"), ("mlp_bias", "gate_proj"), ("bias", "fc")):
        has_bias = config.is_of_model or any(each.endswith(f"{layer}.bias") for each in tensors)
        if config.flag(key) and not has_bias:
            config.refuse(key, f"false, because the files have no {layer}.bias")
    heads = config.whole("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.whole("num_key_value_heads", default=heads),
        "intermediate_size": config.whole("intermediate_size"),
        "head_dim": config.whole("head_dim", default=target.config.hidden_size // heads),
    }
    num_keys, head_dim = sizes["num_key_value_heads"], sizes["head_dim"]
    rows = {"q": heads, "k": num_keys, "qkv": heads + 2 * num_keys}
    rows = {part: number * head_dim for part, number in rows.items()} | {"gate": sizes["intermediate_size"]}
    for each, tensor in tensors.items():
        part = each.removesuffix("_proj.weight").rpartition(".")[2]
        if len(tensor) != rows.get(part, len(tensor)):
            said = (f"{key}={size}" for key, size in sizes.items() if (key == "intermediate_size") == (part == "gate"))
            raise UserError(
                f"{config.path}: {each} must have {rows[part]} rows, as {', '.join(said)} say, but has the shape "
                f"{tuple(tensor.shape)}; download the head again, or choose another"
            )
    known = {field.name for field in fields(HEADS[name].Config)}
    return {setting: [size] for setting, size in sizes.items() if setting in known}


def full_layers(name: str, config: ConfigJson, tensors: Tensors, target: TargetFiles) -> Settings:
    """Returns the sizes of layers that are causal and have no window."""
    types, why = config.take("layer_types"), f"because head {name} has no window"
    config.must_be({"is_causal": True})
    config.must_be(
        {"use_sliding_window": False, "layer_types": [FULL] * (len(types) if isinstance(types, list) else 1)}, why
    )
    if config.take("sliding_window") is not None and types is None and "use_sliding_window" not in config.values:
        config.refuse("sliding_window", f"null or switched off, {why}")
    return layer_sizes(name, config, tensors, target)


def block_attention(config: ConfigJson) -> dict[str, object]:
    """Returns the settings of a block drafter's layers, as vLLM's class reads them."""
    num_layers, uses_swa = config.whole("num_hidden_layers"), config.flag("use_swa")
    is_on, given = config.flag("use_sliding_window"), config.take("layer_types")
    types = [FULL] * num_layers if given is None else given
    if not isinstance(types, list) or len(types) != num_layers or any(x not in (FULL, SLIDING) for x in types):
        config.refuse("layer_types", f"{FULL} or {SLIDING} for each of {num_layers} layers")
    if is_on and given is None:
        config.refuse("use_sliding_window", "false, or stand with layer_types")  # classes guess which layers slide
    causal_where_unset = CausalLayers.sliding if SLIDING in types else CausalLayers.none
    if uses_swa and SLIDING not in types:
        types = [SLIDING] * num_layers
    keys = ("swa_window_size", "sliding_window") if uses_swa or is_on else ("swa_window_size",)
    config.describes("swa_window_size", "sliding_window")
    windows = [config.whole(key) for key in keys if key in config.values]
    if SLIDING in types and not windows:
        raise UserError(
            f"{config.path}: must have a sliding_window, and use_sliding_window=true, for its sliding layers, but does "
            "not; download the head again"
        )
    window = windows[0] if SLIDING in types else None
    if window is not None and window != windows[-1]:
        config.refuse("sliding_window", f"the same as swa_window_size, {window}")
    is_causal = config.flag("is_causal")
    causal = causal_where_unset if is_causal is None else CausalLayers.all if is_causal else CausalLayers.none
    return {"layer_types": types, "sliding_window": window, "causal": causal}


def own_vocabulary(config: ConfigJson, tensors: Tensors, target: TargetFiles) -> list[Any]:
    """Returns the possible sizes of a head's vocabulary; None stands for the target's, whose lm_head it may repeat."""
    lm_head, vocab_size = tensors.get("lm_head.weight"), target.config.vocab_size
    rows = vocab_size if lm_head is None else len(lm_head)
    config.must_be({"draft_vocab_size": rows}, "the rows of the lm_head that the head uses")
    if lm_head is None:
        return [None]
    is_copy = rows == vocab_size and not num_differing_rows(lm_head, load_frozen_parts(target.directory).lm_head)
    return [None, rows] if is_copy else [rows]


def num_differing_rows(tensor: torch.Tensor, reference: torch.Tensor) -> int:
    """Returns how many rows differ by more than `ROUNDING` of their norm; all of them if the shapes differ.

    A head may have trained one row alone, that of its mask token.
    """
    if tensor.shape != reference.shape:
        return len(reference)
    differing = 0
    for ours, theirs in zip(reference.split(4096), tensor.split(4096), strict=True):
        distance = (theirs.float() - ours.float()).norm(dim=-1)
        differing += int((distance > ROUNDING * ours.float().norm(dim=-1)).sum())
    return differing


def eagle3_layers(config: ConfigJson, target: PreTrainedConfig) -> list[list[int]]:
    """Returns the capture layers that the layer ids may mean, most likely first. Without ids they are engines' default.

    SGLang numbers layers differently from the other engines. The `serving.json` of our own exports names the engine.
    Speculators counts as we do. ModelOpt and SpecForge count as SGLang does in most families, and write the ids in
    `eagle_config` alone.
    """
    num_layers = target.num_hidden_layers
    ids = config.layer_ids(LAYER_IDS, default=[])
    config.must_be({"num_aux_hidden_states": len(ids) or 3}, "the number of captured layers")
    if not ids:
        return [[2, num_layers // 2, num_layers - 3]]
    as_sglang, serving = [layer + 1 for layer in ids], config.path.with_name(SERVING)
    engine = read_json(serving).get("engine") if serving.is_file() else config.take(SPECULATORS)
    if target.model_type in FROM_1_IN_SGLANG and ids[0] != 1:
        return [ids]  # which SGLang reads so too
    if engine is not None:
        return [as_sglang if engine == "sglang" else ids]
    choices = [ids, as_sglang] if config.labels[LAYER_IDS] == LAYER_IDS else [as_sglang, ids]
    return [layers for layers in choices if can_capture(layers, num_layers)] or choices
