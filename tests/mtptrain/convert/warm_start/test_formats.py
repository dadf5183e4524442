"""Tests that every format reads back the head that was written in it, even with public tensor names and defaults."""

import json
from pathlib import Path

import pytest
import torch

from mtptrain.convert.base import Tensors, rename
from mtptrain.convert.formats import FORMATS
from mtptrain.convert.limits import BLOCK_DRAFTERS
from mtptrain.convert.published.heads import LEGACY_NAMES
from mtptrain.convert.warm_start import load_init, num_differing_rows
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import TARGET_WEIGHTS, save_head
from mtptrain.heads.peagle import PeagleHead
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import make_target
from tests.mtptrain.convert.conftest import head_config
from tests.mtptrain.convert.warm_start.written_heads import (
    EAGLE,
    EAGLE3,
    MTP,
    VARIANTS,
    assert_equal,
    random_state,
    rewrite,
    unchanged,
    without,
    write,
)

READ_BACK = [(engine, name) for engine, name in FORMATS if engine != "llama_cpp" and name != "native_mtp"]
"""GGUF files of heads are not read; for native_mtp see test_native_modules.py."""


@pytest.mark.parametrize(("engine", "name"), READ_BACK)
def test_every_exported_format_gives_back_the_weights_that_went_in(tmp_path: Path, engine: str, name: str) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    own_vocabulary = None if name in BLOCK_DRAFTERS and engine in ("openvino", "sglang") else 48
    streams = {"capture_layers": [1, 2, 3] if engine == "openvino" else [1, 3], "draft_vocab_size": own_vocabulary}
    block = {**streams, "mask_token_id": 7, "num_layers": 2, "ttt_steps": 5}
    selector = {"conv_group_size": 4, "selector_rank": 32, "causal": "all", "draft_vocab_size": None}
    settings: dict[str, dict[str, object]] = {
        "eagle3": streams,
        "peagle": {**streams, "mask_token_id": 7},
        "dflash": {**block, "head_dim": 64},
        "dspark": {**block, "markov_rank": 8, "sliding_window": 9},
        "dflash2": block | selector,
        "medusa": {"num_layers": 2, "fc_bias": True},
        "draft_model": {"num_hidden_layers": 2},
    }
    config = head_config(name, **settings.get(name, {}))
    state = write(tmp_path / "head", engine, config, target_dir)
    if name in ("eagle3", "peagle"):
        (tmp_path / "head/serving.json").write_text(json.dumps({"engine": engine}))
    assert_equal(load_init(str(tmp_path / "head"), config, TargetFiles(target_dir)), state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_eagle3_is_recognised_by_its_flags_and_tensors(
    tmp_path: Path, tiny_target: Path, variant: str
) -> None:
    state = write(tmp_path / "head", "vllm", VARIANTS[variant], tiny_target)
    assert_equal(load_init(str(tmp_path / "head"), VARIANTS[variant], TargetFiles(tiny_target)), state)
    for other in VARIANTS.keys() - {variant}:
        with pytest.raises(
            ValueError, match=r"head\.init_from: the head's settings must be those of .*, but differ in head\."
        ):
            load_init(str(tmp_path / "head"), VARIANTS[other], TargetFiles(tiny_target))


@pytest.mark.parametrize("config", [MTP, EAGLE, EAGLE3], ids=["mtp", "eagle", "eagle3"])
def test_a_head_of_ours_is_read_whatever_its_depths_and_its_own_start(
    tmp_path: Path, tiny_target: Path, config: HeadConfig
) -> None:
    state = random_state(config, tiny_target)
    settings = {**vars(config), "ttt_steps": 7, "init_from": "/elsewhere"}
    save_head(tmp_path / "best", state, type(config)(**settings), {TARGET_WEIGHTS: "of another target"})
    assert_equal(load_init(str(tmp_path / "best"), config, TargetFiles(tiny_target)), state)


def test_public_eagle3_names_and_extras_are_understood(tmp_path: Path, tiny_target: Path) -> None:
    """Public heads may use the prefixes `model.` and `layers.0.` or the class of a plain Llama.

    They may also hold rotary tables, a copy of the embeddings and zero biases.
    """
    state = write(tmp_path / "head", "vllm", EAGLE3, tiny_target)

    def publish(tensors: Tensors) -> Tensors:
        renamed = {
            "model." + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items() if "." in name
        }
        return {
            **renamed,
            "d2t": tensors["d2t"],
            "t2d": tensors["t2d"],
            "model.embed_tokens.weight": load_frozen_parts(tiny_target).embed_tokens.bfloat16(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
        }

    for architecture in ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"):
        rewrite(
            tmp_path / "head",
            publish if architecture == "LlamaForCausalLM" else unchanged,
            architectures=[architecture],
        )
        assert_equal(load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target)), state)


def test_public_eagle1_names_and_extras_are_understood(tmp_path: Path, tiny_target: Path) -> None:
    state = write(tmp_path / "head", "vllm", EAGLE, tiny_target)
    embeddings = load_frozen_parts(tiny_target).embed_tokens
    rewrite(
        tmp_path / "head",
        lambda tensors: {**tensors, "embed_tokens.weight": embeddings},
        architectures=["LlamaForCausalLM"],
    )
    assert_equal(load_init(str(tmp_path / "head"), EAGLE, TargetFiles(tiny_target)), state)


def test_the_older_names_of_sglangs_norms_are_understood(tmp_path: Path, tiny_target: Path) -> None:
    config = Eagle3Head.Config(capture_layers=[0, 1, 2], fc_norm=True)
    state = write(tmp_path / "head", "vllm", config, tiny_target)

    def older(tensors: Tensors) -> Tensors:
        return rename(tensors, {new: old for old, new in LEGACY_NAMES.items()})

    rewrite(tmp_path / "head", older, fc_norm=None, use_aux_norm=True)
    assert_equal(load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target)), state)


def test_explicit_layer_ids_are_taken_as_either_engine_counts_unless_the_export_says_for_which(
    tmp_path: Path, tiny_target: Path
) -> None:
    """Layer id k means the stream after k layers in vLLM, but after k + 1 layers in SGLang."""
    write(tmp_path / "head", "vllm", Eagle3Head.Config(capture_layers=[0, 1]), tiny_target)
    as_vllm, as_sglang = (Eagle3Head.Config(capture_layers=layers) for layers in ([0, 1], [1, 2]))
    load_init(str(tmp_path / "head"), as_vllm, TargetFiles(tiny_target))
    load_init(str(tmp_path / "head"), as_sglang, TargetFiles(tiny_target))
    with pytest.raises(
        ValueError,
        match=r"differ in head\.capture_layers \(\[0, 1\] \(vLLM's count\) or \[1, 2\] \(SGLang's count\) there, "
        r"\[0, 2\] here\); set head\.capture_layers=\[0,1\], or choose another head",
    ):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[0, 2]), TargetFiles(tiny_target))
    rewrite(tmp_path / "head", unchanged, eagle_aux_hidden_state_layer_ids=None)  # as ModelOpt and SpecForge write
    load_init(str(tmp_path / "head"), as_vllm, TargetFiles(tiny_target))
    with pytest.raises(ValueError, match=r"or \[1, 2\] \(SGLang's .*; set head\.capture_layers=\[1,2\], or choose"):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[0, 2]), TargetFiles(tiny_target))
    for engine in ("vllm", "openvino", "tensorrt_llm", "sglang"):
        right, wrong = (as_sglang, as_vllm) if engine == "sglang" else (as_vllm, as_sglang)
        (tmp_path / "head/serving.json").write_text(json.dumps({"engine": engine}))
        load_init(str(tmp_path / "head"), right, TargetFiles(tiny_target))
        with pytest.raises(ValueError, match=r"but differ in head\.capture_layers"):
            load_init(str(tmp_path / "head"), wrong, TargetFiles(tiny_target))


def test_layer_ids_that_are_left_out_are_the_engines_default(tmp_path: Path) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=8)
    state = write(tmp_path / "head", "vllm", Eagle3Head.Config(), target_dir)
    assert "eagle_config" not in json.loads((tmp_path / "head/config.json").read_text())
    assert_equal(
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[2, 4, 5]), TargetFiles(target_dir)), state
    )
    with pytest.raises(ValueError, match=r"head\.capture_layers \(\[2, 4, 5\] there, \[1, 4, 5\] here\)"):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[1, 4, 5]), TargetFiles(target_dir))


def test_embeddings_rope_and_eps_of_its_own_are_left_out_with_a_warning(tmp_path: Path, tiny_target: Path) -> None:
    state = write(tmp_path / "head", "vllm", EAGLE, tiny_target)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    for change, settings, message in (
        (
            unchanged,
            {"rope_parameters": rope},
            r"rope_parameters should be .*10000\.0.*, the target's value, .* but is .*500000\.0",
        ),
        (
            unchanged,
            {"rope_parameters": None, "rms_norm_eps": 1e-5},
            r"rms_norm_eps should be 1e-06, the target's value",
        ),
        (
            lambda tensors: {**tensors, "lm_head.weight": torch.ones(260, 64)},
            {"rms_norm_eps": 1e-6},
            r"lm_head\.weight should equal the target's, which is used, but differs",
        ),
        (
            lambda tensors: {**without("lm_head.weight")(tensors), "embed_tokens.weight": torch.ones(100, 64)},
            {},
            r"embed_tokens\.weight should equal the target's, .* differs in 260 of 260 rows",
        ),
    ):
        rewrite(tmp_path / "head", change, **settings)
        with pytest.warns(UserWarning, match=message):
            assert_equal(load_init(str(tmp_path / "head"), EAGLE, TargetFiles(tiny_target)), state)


def test_rows_that_differ_are_counted_beyond_rounding() -> None:
    wanted = torch.randn(9000, 3)
    found = wanted.bfloat16()
    assert num_differing_rows(found, wanted) == 0 and num_differing_rows(torch.zeros(2, 3), torch.zeros(2, 3)) == 0
    found[[0, 4096, 8999]] = found[[0, 4096, 8999]] * 1.02
    assert num_differing_rows(found, wanted) == 3
    assert num_differing_rows(found[1:], wanted) == 9000


def test_a_trained_embedding_of_the_mask_token_is_warned_of(tmp_path: Path, tiny_target: Path) -> None:
    """P-EAGLE heads of Speculators train their embeddings."""
    config = PeagleHead.Config(capture_layers=[1, 2], mask_token_id=7)
    write(tmp_path / "head", "vllm", config, tiny_target)
    embeddings = load_frozen_parts(tiny_target).embed_tokens.clone()
    embeddings[7] *= 1.1
    rewrite(tmp_path / "head", lambda tensors: tensors | {"embed_tokens.weight": embeddings})
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight should equal the .* but differs in 1 of 260 rows; the"):
        load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))
