"""Tests that a head which would draft otherwise here than it was trained to is refused by the key or the tensor."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.heads.base import Tensors
from mtptrain.init_from.start import load_init
from mtptrain.settings.heads import HeadConfig, MtpConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import BLOCK_DRAFTERS
from tests.mtptrain.init_from.written_heads import DFLASH, MEDUSA, MTP, Changes, Stored, without, write

MIMO_ARGUMENTS = "head.attention_bias=true head.zero_first_embedding=true head.prenorm_states=true"
Refusals = list[tuple[Changes, str]]

OF_ALL: Refusals = [
    (
        {"attention_sink": [4, 8], "sink_bias": True},
        r"only settings .* has attention_sink=\[4, 8\], sink_bias=true; .* 'head\.ignored_keys=\[\w+,sink_bias\]'",
    ),
    ({"vocab_size": 261}, r"vocab_size must be 260 for this target, but is 261; choose another head"),
]
OF_LAYERS: Refusals = [
    ({"partial_rotary_factor": True}, r"partial_rotary_factor must be 1\.0 .*, but is true"),
    ({"rope_parameters": {"mrope_section": [8, 12, 12]}}, r"but has rope_parameters\.mrope_section=\[8, 12, 12\]"),
    ({"rope_parameters": None, "rope_scaling": "yarn"}, r'rope_scaling must be a section of settings, but is "yarn"'),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"rope_scaling\.rope_type must be the same as rope_p"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"must be readable .* rope_type dynamic, w"),
    ({"rope_parameters": {"full_attention": {}}}, r"must be readable .* RoPE that differs by layer; ch"),
    ({"rope_parameters": {"rope_type": "yarn"}}, r"must be readable by transformers, .*'factor'.*; choose"),
    (
        {"num_attention_heads": 4},
        r"[qkv]+_proj\.weight must have \d+ rows, as num_attention_heads=4.* the shape \(\d+, ",
    ),
    ({"head_dim": 16}, r"[qkv]+_proj\.weight must have \d+ rows, as .* head_dim=16 say"),
    ({"num_key_value_heads": 2}, r"[qkv]+_proj\.weight must have \d+ rows, as .* num_key_value_heads=2"),
    ({"intermediate_size": 128}, r"gate_proj\.weight must have 128 rows, as intermediate_size=128 say"),
    ({"num_attention_heads": 0}, r"num_attention_heads must be a whole number from 1"),
    ({"intermediate_size": None}, r"config\.json: must have intermediate_size, but does not; download the head again"),
]
NO_TYPES = {"layer_types": None, "use_sliding_window": None}
OF_HEADS_WITHOUT_WINDOWS: Refusals = [
    ({"layer_types": ["sliding_attention"]}, r"layer_types must be \[\"full_attention\"\] because head \w+ ha"),
    ({"use_sliding_window": True}, r"use_sliding_window must be false because head \w+ has no window, but is true"),
    ({"sliding_window": 64, **NO_TYPES}, r"sliding_window must be null or .* is 64"),
    ({"is_causal": False}, r"is_causal must be true"),
    ({"num_hidden_layers": 99}, r"num_hidden_layers must be \d"),
]
IDS, SWA_OF_32 = "eagle_aux_hidden_state_layer_ids", {"use_swa": True, "swa_window_size": 32}
OF_KIND: dict[str, Refusals] = {
    "mtp": [({"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers must be 1")],
    "deepseek": [
        ({"mtp_hidden_states_first": True}, r"mtp_hidden_states_first must be false because eh_proj of head mtp reads"),
        ({"model_type": "gemma3_text"}, r"model_type must be one of llama, .*, whose MTP layers are like head mtp"),
    ],
    "eagle3": [
        ({"num_aux_hidden_states": 3}, r"num_aux_hidden_states must be 2 the number of captured layers, but is 3"),
        ({"draft_vocab_size": 96}, r"draft_vocab_size must be 48 the rows of the lm_head .*, but is 96"),
        ({"norm_output": "yes"}, r'norm_output must be true or false, but is "yes"'),
        ({"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False}, r"fc must be the same as norm_before"),
        ({"norm_before_fc": True}, r"norm_before_fc must be false as input_norm\.weight is absent, but is true"),
        ({"norm_output": None, "eagle_config": {"return_hidden_post_norm": True}}, r"head\.norm_output \(True th"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, r"eagle_config\.eh_proj_before_attn must be false as in our"),
        ({"mask_token_id": 3}, r"mask_token_id must be left out, because the head has no mask_hidden, but is 3"),
        ({"attention_bias": True}, r"attention_bias must be false, because the files have no q_proj\.bias, but is tru"),
        ({"architectures": ["EagleMiniCPM"]}, r"a head of class EagleDeep.*, but .* holds a EagleMiniCPM"),
    ],
    "peagle": [({"mask_token_id": None}, r"config\.json: must have mask_token_id, but does not")],
    "medusa": [({"num_attention_heads": 4}, r"must hold only settings that mtptrain .* has num_attention_heads=4")],
    "dflash": [
        ({"is_causal": True}, r"head\.causal \(all there, none here\); set head\.causal=all"),
        (  # transformers' Qwen3Config drops this window
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": False},
            r"must have a sliding_window, and use_sliding_window=true",
        ),
        ({"layer_types": ["full_attention"] * 9}, r"layer_types must be full_attention or .* for each of 2 layers"),
        ({"use_sliding_window": True, "layer_types": None}, r"use_sliding_window must be false, or stand with layer_t"),
        ({"sample_from_anchor": True}, r"sample_from_anchor must be false because engines draft nothing with"),
        ({"dflash_config": {"query_zero_predicts_next": True}}, r"dflash_config\.query_zero\w+ must be false because"),
        ({"dflash_config": {"shift_label": True}}, r"dflash_config\.shift_label must be false because engines draft"),
        ({"sample_from_anchor": False, "query_zero_predicts_next": True}, r"must be the same as \w+, .*; correct"),
        ({"dflash_config": {"projector_type": "domino"}}, r"projector_type must be \"dflash\" for a DFlashDraftModel"),
        ({"dflash_config": {"attention_sink_bias": True}}, r"dflash_config\.attention_sink_bias must be false as in"),
        ({"sliding_window": 64, "dflash_config": SWA_OF_32}, r"sliding_window must be the same as swa_window_size, 32"),
        ({IDS: [1, 3]}, r"layer_ids must be \[1, 2\] as target_layer_ids says, counted from 1, but is \[1, 3\]"),
        ({"dflash_config": {"target_layer_ids": [1, 1]}}, r"set head\.capture_layers=\[2,2\]"),
    ],
    "dspark": [
        ({"confidence_head_with_markov": False}, r"confidence_head_with_markov must be true as in head dspark"),
        ({"dspark_bonus_anchor": True}, r"sample_from_anchor according to dspark_bonus_anchor must be the same as"),
        ({"markov_rank": 0}, r"enable_confidence_head must be false as in head dflash, but is true"),
        ({"dflash_config": {"attention_mode": "mla"}}, r"dflash_config\.attention_mode must be gqa or mha"),
    ],
    "dflash2": [
        ({"dflash_config": {"output_multiplier": 2.0}}, r"dflash_config\.output_multiplier must be 1\.0 .* but is 2\."),
    ],
}


def test_a_head_that_ties_its_lm_head_is_refused_if_the_target_does_not(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=False)
    head = Stored(tmp_path, DFLASH, target, write(tmp_path, "vllm", DFLASH, target))
    head.refuses({"tie_word_embeddings": True}, r"tie_word_embeddings must be false because the target's lm_hea")


def test_a_config_that_cannot_be_honoured_is_refused_by_the_key(heads: dict[str, Stored]) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    for kind, head in heads.items():
        refusals = OF_ALL + OF_KIND.get(kind, [])
        if kind != "medusa":
            refusals = refusals + OF_LAYERS + (OF_HEADS_WITHOUT_WINDOWS if kind not in BLOCK_DRAFTERS else [])
            head.is_read(unused)
            head.is_read({**unused, "layer_types": ["full_attention"] * 2, "attention_sink": None})
        for changes, message in refusals:
            head.refuses(changes, message)


def adding(**tensors: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """Returns a change that adds or replaces tensors; `__` in a name stands for a dot."""
    return lambda stored: stored | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


BEHIND = "model__layers__2__"
WRONG_TENSORS: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("eagle3", without("norm.weight"), r"norm\.weight must be of shape \(64,\) for head eagle3 .* is absent"),
    ("eagle3", adding(fc__weight=torch.ones(64, 64)), r"fc\.weight must be of shape \(64, 128\) .* is of shape"),
    ("eagle3", adding(fc__bias=torch.ones(64)), r"fc\.bias must be zero, because the head has no such bias, but"),
    ("eagle3", adding(d2t=torch.arange(48) + 300), r"d2t of .* within the target's 0\.\.259, but lead to 48 tokens"),
    (
        "eagle3", lambda tensors: tensors | {"t2d": tensors["t2d"].roll(1)},
        r"t2d of .* the 48 that the head drafts according to d2t, but marks 48 among",
    ),
    ("eagle3", adding(layers__0__hidden_norm__weight=torch.ones(64)), r"a tensor must have one name, but \S+ and \S+"),
    ("eagle3", adding(fc__weight=torch.zeros(64, 128, dtype=torch.float8_e4m3fn)), r"fc\.weight must hold flo"),
    ("mtp", without("layers.0.self_attn.qkv_proj"), r"self_attn\.k_proj\.weight must be of shape .* is absent"),
    ("mimo", without("model.mtp_layers."), r"num_nextn_predict_layers=1, but lack its input_proj\.weight;"),
    ("deepseek", adding(**{f"{BEHIND}self_attn__q_norm__weight": torch.ones(64)}), r"q_norm\.weight must be absent"),
    (
        "deepseek", lambda tensors: {name.replace("layers.2.", "layers.9."): x for name, x in tensors.items()},
        r"must hold one MTP layer, model\.layers\.2\. behind the layers of this target, but .* has model\.layers\.9\.",
    ),
    ("deepseek", adding(**{f"{BEHIND}mlp__experts__0__up_proj__weight": torch.ones(64, 64)}), r"a dense Llama .*; se"),
    ("eagle", adding(mtp__fc__weight=torch.ones(64, 128)), r"must be a dense Llama layer in DeepSeek's or MiMo's layo"),
]  # fmt: skip


def test_tensors_that_are_not_the_heads_are_refused_by_their_names(heads: dict[str, Stored]) -> None:
    for kind, change, message in WRONG_TENSORS:
        heads[kind].refuses({}, message, tensors=change)


def test_the_settings_that_match_a_head_are_named(heads: dict[str, Stored]) -> None:
    whole = (
        r"head's settings must be those of .*, but differ in head \(eagle3 there, mtp here\), .*; set head=eagle3 "
        r"head\.num_attention_heads=1 head\.num_key_value_heads=1 head\.intermediate_size=96 head\.head_dim=64 "
        r"head\.draft_vocab_size=48 head\.norm_output=false head\.capture_layers=\[1,2\] head\.norm_before_fc=false, "
        "or choose another head"
    )
    cases: list[tuple[str, HeadConfig, str]] = [
        ("eagle3", MTP, whole),
        ("medusa", replace(MEDUSA, fc_bias=False, num_layers=1), r"; set head\.num_layers=2 head\.fc_bias=true"),
        ("mimo", MtpConfig(), rf"; set {MIMO_ARGUMENTS}, or choose"),
        ("dspark", DFLASH, r"head \(dspark there, dflash here\)"),
    ]
    for kind, config, message in cases:
        heads[kind].of(config).refuses({}, message)


def test_files_that_cannot_be_a_head_are_refused(tmp_path: Path, heads: dict[str, Stored]) -> None:
    target = TargetFiles(heads["eagle3"].target_dir)
    missing = r"weights must be safetensors files, but .* does not exist; convert or download"
    with pytest.raises(UserError, match=r"head\.init_from: must be a local directory, .*none', but the hub"):
        load_init(f"{tmp_path}/none", MTP, target)
    with pytest.raises(UserError, match=missing):
        load_init(str(tmp_path), MTP, target)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"must hold head\.json or config\.json, but .* has neither"):
        load_init(str(tmp_path), MTP, target)
    # Files beside those of a head.
    head, weights = heads["dflash"], load_file(heads["dflash"].directory / "model.safetensors")
    none = {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": []}
    index, quantised = "model.safetensors.index.json", "hf_quant_config.json"
    cases: list[tuple[str, Any, str | None]] = [
        (index, {"weight_map": {"fc.weight": "absent.safetensors"}}, r"must have either model\.safetensors or model"),
        (index, {"weight_map": dict.fromkeys(weights, "model.safetensors")}, None),
        ("mask_embedding.pt", {}, r"mask_embedding\.pt: must not exist, because head dflash takes the embedding"),
        (quantised, {"quantization": none}, None),
        (quantised, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, r"name no quantisation, .*F"),
    ]  # fmt: skip
    for name, content, message in cases:
        beside = head.directory / name
        beside.write_text(json.dumps(content))
        try:
            head.is_read() if message is None else head.refuses({}, message)
        finally:
            beside.unlink()
