"""Tests that heads of other projects, and our own exports, are read with the weights that they have."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.heads.base import Tensors
from mtptrain.init_from.readers import MODEL_OPT_EAGLE3, OLDER_NORMS
from mtptrain.init_from.start import load_init
from mtptrain.settings.heads import HEAD_CONFIGS, Eagle3Config, HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import head_config
from tests.mtptrain.engines.test_formats import CASES, QWEN3_5, ROPE, target_of
from tests.mtptrain.init_from.written_heads import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MEDUSA,
    PEAGLE,
    Changes,
    Stored,
    assert_equal,
    random_state,
    without,
    write,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(("engine", "name", "settings"), CASES)
def test_every_export_gives_back_the_weights_that_went_in(
    tmp_path: Path, deep_target: Path, engine: str, name: str, settings: dict[str, Any]
) -> None:
    """GGUF files of heads are not read; for native_mtp see test_native_mtp.py."""
    config, target_dir = head_config(name, **settings), deep_target
    if target_of(engine, name) is QWEN3_5:
        rope = {"rope_parameters": ROPE, "pad_token_id": 0}
        target_dir = make_target(tmp_path / "target", "qwen3_5_text", rope, num_hidden_layers=4)
    state = write(tmp_path / "head", engine, config, target_dir)
    if name in ("eagle3", "peagle"):  # engines count layers differently
        (tmp_path / "head/serving.json").write_text(json.dumps({"engine": engine}))
    assert_equal(load_init(str(tmp_path / "head"), config, TargetFiles(target_dir))[1], state)


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 64}
EAGLE3_VARIANTS = {
    "own vocabulary": EAGLE3,
    "shared lm_head": Eagle3Config(capture_layers=[0, 1, 2]),
    "whole vocabulary": Eagle3Config(capture_layers=[1, 2], draft_vocab_size=260),
    "norms before": Eagle3Config(capture_layers=[0, 2], norm_output=False, norm_before_residual=True),
    "own RoPE": Eagle3Config(capture_layers=[0, 1], rope_parameters=YARN),
    "eagle3.1": Eagle3Config(capture_layers=[0, 1, 2], fc_norm=True, norm_before_fc=False),
}


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_every_variant_of_eagle3_is_recognised(tmp_path: Path, tiny_target: Path, variant: str) -> None:
    config = EAGLE3_VARIANTS[variant]
    head = Stored(tmp_path, config, tiny_target, write(tmp_path, "vllm", config, tiny_target))
    head.is_read()
    for other in EAGLE3_VARIANTS.keys() - {variant}:
        head.of(EAGLE3_VARIANTS[other]).refuses({}, r"head's settings must be those of .*, but differ in head\.")
    if variant == "eagle3.1":  # SGLang's older names
        older = {new: old for old, new in OLDER_NORMS.items()}
        renamed = lambda tensors: {older.get(name, name): tensor for name, tensor in tensors.items()}  # noqa: E731
        head.is_read({"fc_norm": None, "use_aux_norm": True}, tensors=renamed)


def as_published(tensors: Tensors) -> Tensors:
    """Returns an EAGLE-3 head with the prefixes and the redundant tensors that published heads may have."""
    renamed = {"model." + name.replace("midlayer.", "layers.0."): x for name, x in tensors.items() if "." in name}
    return renamed | {
        "d2t": tensors["d2t"],
        "t2d": tensors["t2d"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
    }


MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
BLOCK_FLAGS = {"causal": False, "use_swa": False, "swa_window_size": 64, "sample_from_anchor": False, "block_size": 4}
PLAIN_FACTORS = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": None}
AUTOMODEL = {"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": PLAIN_FACTORS}
MIXED: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": 64}
ALL_SLIDE: dict[str, Any] = {"layer_types": [SLIDING] * 2, "sliding_window": 64}
ON, CAUSAL = {"use_sliding_window": True}, replace(DFLASH, causal="all")
SWA = {"use_swa": True, "swa_window_size": 64}
DEEPSPEC_DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
SPECFORGE_DSPARK = {
    "confidence_head_alpha": 1.0, "attention_mode": "gqa", "projector_type": "dspark", "markov_rank": 4,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
AS_DFLASH = {"architectures": ["DFlashDraftModel"]}
MODEL_OPT_DSPARK = {"projector_type": "dspark", "shift_label": True, "markov_rank": 4, "use_confidence_head": True}
PROJECTS: list[tuple[str, str, HeadConfig, Changes, tuple[str, ...]]] = [
    ("EAGLE's authors", "eagle", HEAD_CONFIGS["eagle"](), {"architectures": ["LlamaForCausalLM"]}, ()),
    ("EAGLE's authors", "eagle3", EAGLE3, {"architectures": ["LlamaForCausalLM"]}, ()),
    ("ModelOpt", "eagle3", EAGLE3, {**MODEL_OPT_EAGLE3, "eagle_config": MODEL_OPT_EAGLE3}, ()),
    ("no sizes", "dflash", DFLASH, {"dflash_config": {"block_size": 4}}, ("block_size", "vocab_size")),
    ("all flags", "dflash", DFLASH, {"dflash_config": BLOCK_FLAGS, "sample_from_anchor": False}, ()),
    ("z-lab", "dflash", DFLASH, {"query_zero_predicts_next": False, "auto_map": {"AutoModel": "dflash.D"}}, ()),
    ("NeMo Automodel", "dflash", DFLASH, AUTOMODEL, ()),
    ("SpecForge", "dflash", DFLASH, {"rope_scaling": {"type": "default"}, "rope_theta": 1e6}, ()),
    ("JetSpec", "dflash", CAUSAL, {"dflash_config": {"causal": True}}, ("is_causal",)),
    ("JetSpec", "dflash", replace(CAUSAL, **ALL_SLIDE), {**ALL_SLIDE, **ON, "is_causal": True}, ()),
    ("z-lab, not causal", "dflash", replace(DFLASH, **MIXED), {**MIXED, **ON}, ()),
    ("z-lab", "dflash", replace(DFLASH, sliding_window=64), {"layer_types": [SLIDING, FULL], "dflash_config": SWA}, ()),
    ("z-lab", "dflash", replace(DFLASH, **MIXED, causal="sliding"), {**MIXED, **ON}, ("is_causal",)),
    # `use_swa` does not make layers causal
    ("XiaomiMiMo", "dflash", replace(DFLASH, **ALL_SLIDE), {"dflash_config": SWA}, ("is_causal", "layer_types")),
    ("Automodel", "dspark", DSPARK, {"architectures": ["DSparkDraftModel"], "num_anchors": 512}, ("dflash_config",)),
    ("nested keys", "dspark", DSPARK, {}, ("target_layer_ids", "mask_token_id", "sample_from_anchor")),
    ("SpecForge", "dspark", DSPARK, {"dflash_config": SPECFORGE_DSPARK}, MARKOV),
    ("SGLang", "dspark", DSPARK, {"dspark_config": SPECFORGE_DSPARK, "dspark_bonus_anchor": False}, MARKOV),
    (
        "DeepSpec", "dspark", replace(DFLASH, sample_from_anchor=True), DEEPSPEC_DFLASH,
        ("dflash_config", "sample_from_anchor", *MARKOV[1:]),
    ),
    ("ModelOpt", "dspark", DSPARK, AS_DFLASH | {"dflash_config": MODEL_OPT_DSPARK}, (*MARKOV, "sample_from_anchor")),
    ("Automodel", "dflash2", DFLASH2, {"architectures": ["Qwen3DFlash2DraftModel"]}, ("block_size",)),
]  # fmt: skip
"""Projects and their heads: the kind of an export, our settings, and what changes in its config.json."""
OF_TENSORS: dict[tuple[str, str], Callable[[Tensors], Tensors]] = {
    ("EAGLE's authors", "eagle3"): as_published,
    ("ModelOpt", "dspark"): lambda tensors: {
        name.removeprefix("markov_head.").replace("ence_head.proj", "ence_proj"): x for name, x in tensors.items()
    },
    ("DeepSpec", "dspark"): lambda tensors: without("markov_head.")(without("confidence_head.")(tensors)),
}
"""What changes in the tensors of some of them."""


@pytest.mark.parametrize("case", PROJECTS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_heads_of_other_projects_are_read(heads: dict[str, Stored], case: tuple[Any, ...]) -> None:
    project, kind, config, changes, removed = case
    head = heads[kind].of(config)
    if project == "DeepSpec":
        state = {name: x for name, x in head.state.items() if not name.startswith(("markov", "conf"))}
        head = replace(head, state=state)
    head.is_read(changes, removed, tensors=OF_TENSORS.get((project, kind)))


IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "hidden_act")
SIZES += ("vocab_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "layer_types", "sliding_window")
BLOCK_KEYS = {"mask_token_id": 7, "aux_hidden_state_layer_ids": [1, 2], "block_size": 4, "draft_vocab_size": 260}
PLAIN = {**BLOCK_KEYS, "sliding_window_non_causal": False, "sample_from_anchor": False}
WITH_MARKOV = {**PLAIN, "markov_rank": 4, "markov_head_type": "vanilla"} | dict.fromkeys(MARKOV[2:], True)
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 5}
EAGLE_KEYS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
EAGLE_KEYS |= {"draft_vocab_size": 48, IDS: [1, 2], "embed_requires_grad": False, "target_hidden_size": None}
SPECULATORS: dict[str, tuple[HeadConfig, str, dict[str, Any]]] = {
    "eagle3": (EAGLE3, "eagle3", EAGLE_KEYS),
    "peagle": (PEAGLE, "peagle", EAGLE_KEYS | {"draft_vocab_size": 260, "mask_token_id": 7}),
    "dflash": (DFLASH, "dflash", PLAIN),
    "mixed, not causal": (replace(DFLASH, **MIXED), "dflash", PLAIN | {"sliding_window_non_causal": True}),
    # Older versions have no key for causality and for the first token, and two keys more.
    "older dflash": (DFLASH, "dflash", BLOCK_KEYS | {"max_anchors": 512, "has_no_defaults_at_init": False}),
    "dspark": (DSPARK, "dspark", WITH_MARKOV | {"block_size": 3, "sample_from_anchor": True}),
    "dspark, fill-in": (replace(DSPARK, sample_from_anchor=False), "dspark", WITH_MARKOV),
    "dflash2 without a key": (replace(DFLASH2, **MIXED), "dflash2", BLOCK_KEYS | SELECTOR),
}  # fmt: skip
REFUSED_OF_SPECULATORS: list[tuple[str, Changes, str]] = [
    ("dflash", {"speculators_model_type": ["dflash"]}, r"model_type must be one of eagle3, .* are \[\"dflash"),
    ("dflash", {"transformer_layer_config": None}, r"layer_config must hold settings, but they are .* null"),
    ("dflash", {"num_hidden_layers": 3}, r"config\.num_hidden_layers must be the same as num_hidden_layers"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1, 2]}}, r"ids according to aux_hid\w+ must be the same as"),
    ("mixed, not causal", {"is_causal": True}, r"is_causal according to sliding_window_non_causal must be the same as"),
    ("dflash", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}}, r"for at most 3 tokens, as"),
    ("dspark", {"speculators_config": {"algorithm": "dflash"}}, r"\.algorithm must be the same as speculators_model_t"),
    ("dflash", {"aux_hidden_state_layer_ids": [True, 2]}, r"aux_hidden_state_layer_ids must be a list of layer ids"),
    ("dspark", {"sample_from_anchor": None}, r"must have sample_from_anchor, because Speculators and vLLM have"),
]


@pytest.mark.parametrize("layout", SPECULATORS)
def test_heads_of_speculators_are_read_as_they_were_trained_or_refused(
    tmp_path: Path, tiny_target: Path, layout: str
) -> None:
    config, kind, keys = SPECULATORS[layout]
    state, path = write(tmp_path, "vllm", config, tiny_target), tmp_path / "config.json"
    stored = json.loads(path.read_text())
    layers = {name: stored[name] for name in SIZES if name in stored} | {"model_type": "qwen3", "attention_bias": False}
    described = {
        "architectures": [f"{kind.title()}Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind}, "transformer_layer_config": layers, "dtype": "float32",
    }  # fmt: skip
    path.write_text(json.dumps(described | keys))
    head = Stored(tmp_path, config, tiny_target, state)
    head.is_read()
    for of_layout, changes, message in REFUSED_OF_SPECULATORS:
        if of_layout == layout:
            head.refuses(changes, message)


def test_medusa_heads_in_the_layout_of_their_authors_are_read(tmp_path: Path, tiny_target: Path) -> None:
    state, lm_head = random_state(MEDUSA, tiny_target), load_frozen_parts(tiny_target).lm_head
    described = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    head = Stored(tmp_path, MEDUSA, tiny_target, state)

    def publish(lm_heads: list[torch.Tensor], prefix: str = "") -> None:
        pattern = r"blocks\.(\d)\.layers\.(\d)"
        layers = {re.sub(pattern, rf"{prefix}\1.\2.linear", name): tensor for name, tensor in state.items()}
        layers |= {f"{prefix}{depth}.2.weight": each.clone() for depth, each in enumerate(lm_heads)}
        save_file(layers, tmp_path / "model.safetensors")

    for prefix in ("", "medusa_heads.", "medusa_head."):
        publish([lm_head] * 3, prefix)
        head.is_read()
    publish([lm_head, lm_head * 2, lm_head])
    with pytest.warns(UserWarning, match=r"lm_heads\.1\.weight should equal the target's, which is used, but differs"):
        head.is_read()
    publish([torch.ones(261, 64)] * 3)
    head.refuses({}, r"lm_heads\.0\.weight of .* must have 260 rows, the target's vocabulary, but has 261")


def test_the_projection_of_mimos_layer_gets_our_order_of_columns(heads: dict[str, Stored]) -> None:
    mimo = heads["mimo"]
    stored = load_file(mimo.directory / "model.safetensors")["model.mtp_layers.0.input_proj.weight"]
    assert torch.equal(mimo.state["eh_proj.weight"], torch.cat([stored[:, 64:], stored[:, :64]], 1))
    assert mimo.state["self_attn.q_proj.bias"].any()


def test_layer_ids_are_counted_as_either_engine_does_unless_the_export_says_for_which(
    tmp_path: Path, tiny_target: Path, deep_target: Path
) -> None:
    """Layer id k means the stream after k layers in vLLM, but after k + 1 layers in SGLang."""
    as_vllm, as_sglang, as_neither = (Eagle3Config(capture_layers=layers) for layers in ([0, 1], [1, 2], [0, 2]))
    head = Stored(tmp_path, as_vllm, tiny_target, write(tmp_path, "vllm", as_vllm, tiny_target))
    head.is_read()
    head.of(as_sglang).is_read()
    differ = r"differ in head\.capture_layers \(\[0, 1\] or \[1, 2\] there, \[0, 2\] here\); set head\.capture"
    head.of(as_neither).refuses({}, differ)
    # ModelOpt and SpecForge write the ids in `eagle_config` alone. Without ids, they are the engines' default.
    head.is_read(removed=(IDS,))
    head.of(as_neither).refuses({}, r"; set head\.capture_layers=\[1,2\], or choose", removed=(IDS,))
    none = (IDS, "eagle_config", "num_aux_hidden_states")
    replace(head, target_dir=deep_target).refuses({}, r"head\.capture_layers \(\[2, 2, 1\] there", removed=none)
    for engine in ("vllm", "sglang"):
        right, wrong = (as_sglang, as_vllm) if engine == "sglang" else (as_vllm, as_sglang)
        (tmp_path / "serving.json").write_text(json.dumps({"engine": engine}))
        head.of(right).is_read()
        head.of(wrong).refuses({}, r"but differ in head\.capture_layers")


def test_a_copy_of_the_targets_lm_head_need_not_become_a_vocabulary_of_its_own(heads: dict[str, Stored]) -> None:
    dspark, own = heads["dspark"], replace(DSPARK, draft_vocab_size=260)
    parts = load_frozen_parts(dspark.target_dir)  # DeepSpec stores both
    copies = {"embed_tokens.weight": parts.embed_tokens.clone(), "lm_head.weight": parts.lm_head.clone()}
    for head in (dspark, heads["dflash2"]):
        head.is_read(tensors=lambda tensors: tensors | copies)
    with dspark.changed(tensors=lambda tensors: tensors | copies):
        assert_equal(dspark.of(own).read(), dspark.state | {"lm_head.weight": parts.lm_head})
    message, other = r"head\.draft_vocab_size \(260 there, None here\)", {"lm_head.weight": 2 * parts.lm_head}
    dspark.refuses({}, message, tensors=lambda tensors: tensors | other)


WARNED: list[tuple[str, Changes, dict[str, torch.Tensor], str]] = [
    ("dflash", {"rms_norm_eps": 1e-3}, {}, r"rms_norm_eps should be 1e-06, the target's value, .* but is 0\.001"),
    ("eagle", {}, {"lm_head.weight": torch.ones(260, 64)}, r"lm_head\.weight should equal the target's, which is"),
    ("eagle", {}, {"embed_tokens.weight": torch.ones(100, 64)}, r"embed_tokens\.weight .* 260 of 260 rows"),
]


def test_what_is_the_targets_in_our_heads_is_warned_of_if_a_head_has_another(heads: dict[str, Stored]) -> None:
    for kind, changes, extra, message in WARNED:
        with pytest.warns(UserWarning, match=message):
            heads[kind].is_read(changes, tensors=lambda tensors, extra=extra: tensors | extra)
    rounded = {"embed_tokens.weight": load_frozen_parts(heads["eagle"].target_dir).embed_tokens.bfloat16()}
    # GGUF files round the eps to fp32.
    heads["eagle"].is_read({"rms_norm_eps": 9.999999974752427e-07}, tensors=lambda tensors: tensors | rounded)
    embeddings = load_frozen_parts(heads["peagle"].target_dir).embed_tokens.clone()
    embeddings[7] *= 1.1  # heads of Speculators train the embedding of the mask token
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight .* 1 of 260 rows"):
        heads["peagle"].is_read(tensors=lambda tensors: tensors | {"embed_tokens.weight": embeddings})


def test_a_head_is_read_with_the_rope_that_it_was_trained_with(heads: dict[str, Stored]) -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5}
    for kind in ("mimo", "dflash", "eagle"):
        head, changes = heads[kind], {"rope_parameters": None, "rope_scaling": YARN}
        for rope in (YARN, plain):  # projects may add scaling at the export
            head.of(replace(head.config, rope_parameters=rope)).is_read(changes)
        argument = r"set '\+head\.rope_parameters=\{rope_type:default,rope_theta:500000\.0\}'"
        head.refuses({"rope_parameters": {"rope_theta": 5e5}}, argument)
    model_opt = {"rope_parameters": None, "rope_scaling": YARN | {"rope_theta": 1e4}, "eagle_config": MODEL_OPT_EAGLE3}
    heads["eagle3"].refuses(model_opt, argument.replace("500000", "10000"))
    heads["eagle3"].of(replace(EAGLE3, rope_parameters=plain | {"rope_theta": 1e4})).is_read(model_opt)
