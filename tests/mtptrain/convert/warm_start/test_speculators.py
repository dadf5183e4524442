"""Tests that heads in the layout of vLLM Speculators are read as they were trained, or refused by the key."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtptrain.convert.warm_start import load_init
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.peagle import PeagleHead
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
    "dflash, causal where it slides": (
        replace(DFLASH, causal="sliding", **MIXED), "dflash", PLAIN,
    ),
    "dflash, not causal": (replace(DFLASH, **MIXED), "dflash", PLAIN | {"sliding_window_non_causal": True}),
    "dspark": (DSPARK, "dspark", PLAIN | MARKOV | {"block_size": 3, "sample_from_anchor": True}),
    "dspark, fill-in": (replace(DSPARK, sample_from_anchor=False), "dspark", PLAIN | MARKOV),
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


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("dflash", "mtp", {}, r"speculators_model_type must be one of eagle3, .*, but is mtp; choose another head"),
    ("eagle3", "eagle3", {"norm_before_residual": None}, r"must have norm_before_residual, but does not"),
    ("dspark", "dspark", {"sample_from_anchor": None}, r"must have sample_from_anchor, but does not"),
    ("dflash", "dflash", {"transformer_layer_config": None}, r"must have transformer_layer_config, but does not"),
    (
        "dflash",
        "dflash",
        {"transformer_layer_config": 1},
        r"transformer_layer_config must hold settings and aux_",
    ),
    ("dflash", "dflash", {"aux_hidden_state_layer_ids": 2}, r"aux_hidden_state_layer_ids a list, but .* and 2; down"),
    ("dflash", "dflash", {"aux_hidden_state_layer_ids": ["a"]}, r"target_layer_ids must be a list of layer ids"),
    ("dflash", "dflash", {"other": 1}, r"must hold only settings that mtptrain understands, .* but has other=1"),
    ("dflash", "dflash", {"sample_from_anchor": True}, r"sample_from_anchor must be false"),
    ("dspark", "dspark", {"markov_head_type": "rnn"}, r"markov_head_type must be .*vanilla.*, but is .*rnn"),
    ("dspark", "dspark", {"block_size": 5}, r"head\.ttt_steps \(5 there, 3 here\); set head\.ttt_steps=5"),
    ("dflash", "dflash", {"block_size": "x"}, r"block_size must be a whole number"),
]


@pytest.mark.parametrize(("layout", "kind", "change", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_by_the_key(
    tmp_path: Path, tiny_target: Path, layout: str, kind: str, change: dict[str, Any], message: str
) -> None:
    config, _, keys = LAYOUTS[layout]
    write(tmp_path / "head", "vllm", config, tiny_target)
    as_speculators(tmp_path / "head", kind, keys | change)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))
