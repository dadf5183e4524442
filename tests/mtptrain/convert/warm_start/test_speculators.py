"""Tests that heads in the layout of vLLM Speculators are read as they were trained, or refused by the key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtptrain.convert.published.speculators import CAPTURED, LAYERS, NON_CAUSAL, SPECULATORS
from mtptrain.convert.warm_start import load_init
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.peagle import PeagleHead
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from tests.mtptrain.convert.warm_start.written_heads import DFLASH, EAGLE3, assert_equal, write

MIXED = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
DSPARK = DsparkHead.Config(capture_layers=[1, 2], ttt_steps=3, num_layers=2, markov_rank=4, mask_token_id=7)
DFLASH2 = Dflash2Head.Config(
    capture_layers=[1, 2], ttt_steps=3, num_layers=2, selector_rank=4, selector_top_k=5, mask_token_id=7
)
BLOCK = {"mask_token_id": 7, "aux_hidden_state_layer_ids": [1, 2], "block_size": 4, "draft_vocab_size": 260}
PLAIN = {**BLOCK, "sliding_window_non_causal": False, "sample_from_anchor": False}
MARKOV = {"markov_rank": 4, "markov_head_type": "vanilla"} | dict.fromkeys(
    ("enable_confidence_head", "confidence_head_with_markov"), True
)
EAGLE = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
EAGLE |= {"eagle_aux_hidden_state_layer_ids": [1, 2], "embed_requires_grad": False, "target_hidden_size": None}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 5}
LAYOUTS: dict[str, tuple[HeadConfig, str, dict[str, Any]]] = {
    "eagle3": (EAGLE3, "eagle3", EAGLE | {"draft_vocab_size": 48}),
    "eagle3 with a norm": (
        replace(EAGLE3, norm_before_residual=True), "eagle3",
        EAGLE | {"draft_vocab_size": 48, "norm_before_residual": True},
    ),
    "peagle": (
        PeagleHead.Config(capture_layers=[1, 2], mask_token_id=7), "peagle",
        EAGLE | {"draft_vocab_size": 260, "mask_token_id": 7, "embed_requires_grad": True},
    ),
    "dflash": (DFLASH, "dflash", PLAIN),
    "mixed": (
        replace(DFLASH, causal="sliding", **MIXED), "dflash", PLAIN,
    ),
    "mixed, not causal": (replace(DFLASH, **MIXED), "dflash", PLAIN | {"sliding_window_non_causal": True}),
    # Older versions have no key for causality and for the first token, and two keys more.
    "older dflash": (DFLASH, "dflash", BLOCK | {"max_anchors": 512, "has_no_defaults_at_init": False}),
    "dspark": (DSPARK, "dspark", PLAIN | MARKOV | {"block_size": 3, "sample_from_anchor": True}),
    "dspark, fill-in": (replace(DSPARK, sample_from_anchor=False), "dspark", PLAIN | MARKOV),
    "dflash2 without a key": (replace(DFLASH2, **MIXED), "dflash2", BLOCK | CONVOLUTION),
    "dflash2": (DFLASH2, "dflash2", PLAIN | CONVOLUTION | {"sliding_window_non_causal": True}),
}  # fmt: skip


def as_speculators(directory: Path, kind: str, keys: dict[str, Any]) -> None:
    """Change the config.json of a written head to the layout of Speculators."""
    stored = json.loads((directory / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size", "hidden_act")
    names += ("vocab_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "layer_types", "sliding_window")
    layers = {name: stored[name] for name in names if name in stored} | {"model_type": "qwen3", "attention_bias": False}
    config = {
        "architectures": [f"{kind.title()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": layers,
        "dtype": "float32",
        **keys,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "serving.json").unlink(missing_ok=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_read_as_it_was_trained(tmp_path: Path, tiny_target: Path, layout: str) -> None:
    config, kind, keys = LAYOUTS[layout]
    state = write(tmp_path / "head", "vllm", config, tiny_target)
    as_speculators(tmp_path / "head", kind, keys)
    assert_equal(load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target)), state)


def test_captured_layers_are_counted_as_here(tmp_path: Path, tiny_target: Path) -> None:
    """Other heads of EAGLE-3 may count as SGLang does."""
    config = replace(EAGLE3, capture_layers=[0, 1])
    write(tmp_path / "head", "vllm", config, tiny_target)
    keys = LAYOUTS["eagle3"][2] | {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    as_speculators(tmp_path / "head", "eagle3", keys)
    load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))
    with pytest.raises(ValueError, match=r"head\.capture_layers \(\[0, 1\] there, \[1, 2\] here\)"):
        load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "dflash",
        {SPECULATORS: "mtp"},
        r"speculators_model_type must be one of eagle3, .*, but is mtp; choose",
    ),
    (
        "dflash",
        {SPECULATORS: ["dflash"]},
        r"speculators_model_type must be one of .*, but is \['dflash'\]; choose",
    ),
    (
        "eagle3",
        {"norm_before_residual": None},
        r"norm_before_residual must be true or false, but is None, .*; add no",
    ),
    ("dspark", {"sample_from_anchor": None}, r"sample_from_anchor must be true or false, but is None"),
    ("mixed", {NON_CAUSAL: None}, r"sliding_window_non_causal must be true or false, but is None"),
    ("mixed", {NON_CAUSAL: "no"}, r"sliding_window_non_causal must be true or false, but is no"),
    ("dflash", {LAYERS: None}, r"transformer_layer_config must hold settings, but is None; download"),
    ("dflash", {CAPTURED: 2}, r"aux_hidden_state_layer_ids must be a list of layers, but is 2; download"),
    ("dflash", {CAPTURED: [True, 2]}, r"aux_hidden_state_layer_ids must be a list of layers, but is \[True, 2\]"),
    ("dflash", {"layer_types": 5}, r"layer_types must be full_attention or sliding_attention in each layer"),
    ("mixed", {"use_sliding_window": False}, r"must have a sliding_window, and use_sliding_window=true"),
    ("dflash", {"other": 1}, r"must hold only settings that mtptrain understands, .* but has other=1"),
    ("dflash", {"sample_from_anchor": True}, r"sample_from_anchor must be false"),
    ("dspark", {"markov_head_type": "rnn"}, r"markov_head_type must be .*vanilla.*, but is .*rnn"),
    ("dspark", {"block_size": 5}, r"head\.ttt_steps \(5 there, 3 here\); set head\.ttt_steps=5"),
    ("dflash", {"block_size": "x"}, r"block_size must be a whole number"),
]


@pytest.mark.parametrize(("layout", "change", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_by_the_key(
    tmp_path: Path, tiny_target: Path, layout: str, change: dict[str, Any], message: str
) -> None:
    config, kind, keys = LAYOUTS[layout]
    write(tmp_path / "head", "vllm", config, tiny_target)
    as_speculators(tmp_path / "head", kind, keys | change)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))
