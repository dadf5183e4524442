"""Tests exports for vLLM against the names, shapes and settings in the source of vLLM 0.32."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig

from mtptrain.engines.table import format_for
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import head_config, random_head, shapes, target_config

LAYER = {
    "input_layernorm.weight": [64],
    "self_attn.q_proj.weight": [64, 64],
    "self_attn.k_proj.weight": [64, 64],
    "self_attn.v_proj.weight": [64, 64],
    "self_attn.o_proj.weight": [64, 64],
    "post_attention_layernorm.weight": [64],
    "mlp.gate_proj.weight": [96, 64],
    "mlp.up_proj.weight": [96, 64],
    "mlp.down_proj.weight": [64, 96],
}


def test_mtp_has_the_tensors_of_deepseek_eagle(target: LlamaConfig) -> None:
    """The tensors are enorm, hnorm, fc, norm and a layer whose query, key and value are one tensor on disk.

    The embeddings and the lm_head are left out, because the head shares the target's.
    """
    config = head_config("mtp")
    head = random_head(config, target)
    tensors = format_for("vllm", config, target).tensors(head.state_dict())
    qkv = "layers.0.self_attn.qkv_proj.weight"
    layer = {
        f"layers.0.{name}": shape
        for name, shape in LAYER.items()
        if "q_" not in name and "k_" not in name and "v_" not in name
    }
    norms = {"enorm.weight": [64], "hnorm.weight": [64], "norm.weight": [64]}
    assert shapes(tensors) == {**norms, "fc.weight": [64, 128], qkv: [192, 64], **layer}
    for part, tensor in zip("qkv", tensors[qkv].split(64), strict=True):
        assert torch.equal(tensor, head.state_dict()[f"self_attn.{part}_proj.weight"])
    assert torch.equal(tensors["fc.weight"], head.state_dict()["eh_proj.weight"]), "the embedding's columns come first"


def test_grouped_query_heads_are_split_where_they_were_joined() -> None:
    target = target_config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    config = head_config("mtp")
    form, state = format_for("vllm", config, target), random_head(config, target).state_dict()
    assert form.tensors(state)["layers.0.self_attn.qkv_proj.weight"].shape == (256 + 2 * 128, 256)
    restored = form.state(form.tensors(state))
    assert all(
        torch.equal(restored[f"self_attn.{part}_proj.weight"], state[f"self_attn.{part}_proj.weight"]) for part in "qkv"
    )


def test_mtp_is_a_dense_layer_without_latent_attention_in_a_class_for_deepseek(target: LlamaConfig) -> None:
    config = format_for("vllm", head_config("mtp"), target).config_json("bfloat16")
    assert config["architectures"] == ["EagleDeepSeekMTPModel"] and config["model_type"] == "llama"
    assert config["qk_nope_head_dim"] == config["qk_rope_head_dim"] == config["n_routed_experts"] == 0
    assert config["first_k_dense_replace"] > 1000, "must exceed the target's number of layers"
    assert "routed_scaling_factor" not in config and config["dtype"] == "bfloat16"


def test_eagle_has_the_tensors_of_llama_eagle(target: LlamaConfig) -> None:
    """The only norm is before the MLP, because vLLM's class removes the input norm and has no final norm."""
    form = format_for("vllm", head_config("eagle"), target)
    tensors = form.tensors(random_head(form.head, target).state_dict())
    layer = {f"layers.0.{name}": shape for name, shape in LAYER.items() if name != "input_layernorm.weight"}
    assert shapes(tensors) == {"fc.weight": [64, 128], **layer}
    assert form.config_json("bfloat16")["architectures"] == ["EagleLlamaForCausalLM"]


def eagle3_layer() -> dict[str, list[int]]:
    wide = {f"self_attn.{part}_proj.weight": [64, 128] for part in "qkv"}  # columns of the embedding, then of the state
    return {f"midlayer.{name}": shape for name, shape in {**LAYER, **wide, "hidden_norm.weight": [64]}.items()}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {"fc.weight": [64, 192]}),
        ({"capture_layers": [2]}, {"fc.weight": [64, 64]}),
        ({"draft_vocab_size": 260}, {"fc.weight": [64, 192], "lm_head.weight": [260, 64]}),
        (
            {"draft_vocab_size": 96},
            {"fc.weight": [64, 192], "lm_head.weight": [96, 64], "d2t": [96], "t2d": [260]},
        ),
        ({"norm_before_fc": True}, {"fc.weight": [64, 192], "input_norm.weight": [192]}),
        ({"fc_norm": True}, {"fc.weight": [64, 192], **{f"fc_norm.{i}.weight": [64] for i in range(3)}}),
    ],
)
def test_eagle3_has_the_tensors_of_llama_eagle3(
    target: LlamaConfig, settings: dict[str, object], more: dict[str, list[int]]
) -> None:
    """Without a smaller draft vocabulary, d2t and t2d must be left out, because vLLM refuses them."""
    form = format_for("vllm", head_config("eagle3", **settings), target)
    tensors = form.tensors(random_head(form.head, target).state_dict())
    assert shapes(tensors) == {**eagle3_layer(), "norm.weight": [64], **more}


def test_eagle3_names_every_variant_in_its_config(target: LlamaConfig) -> None:
    flags = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
    plain = format_for("vllm", head_config("eagle3"), target).config_json("bfloat16")
    assert plain["architectures"] == ["LlamaForCausalLMEagle3"]
    assert plain["draft_vocab_size"] is None and not any(plain[flag] for flag in flags)
    for flag in flags:
        config = format_for("vllm", head_config("eagle3", **{flag: True}), target).config_json("bfloat16")
        assert [name for name in flags if config[name]] == [flag]
    config = format_for("vllm", head_config("eagle3", draft_vocab_size=96, head_dim=128), target).config_json(
        "bfloat16"
    )
    assert config["draft_vocab_size"] == 96 and config["head_dim"] == 128


def test_peagle_adds_the_state_and_the_token_of_mask_rows_to_eagle3(target: LlamaConfig) -> None:
    form, plain = (format_for("vllm", head_config(name), target) for name in ("peagle", "eagle3"))
    tensors = shapes(form.tensors(random_head(form.head, target).state_dict()))
    assert tensors == {**eagle3_layer(), "norm.weight": [64], "fc.weight": [64, 192], "mask_hidden": [1, 192]}
    assert form.config_json("bfloat16") == plain.config_json("bfloat16") | {"mask_token_id": 259}
    assert '"parallel_drafting": true' in form.launch("TARGET", Path("/DIR"), 5)
    assert "parallel_drafting" not in plain.launch("TARGET", Path("/DIR"), 5)


def test_medusa_has_its_own_names_and_the_targets_lm_head_in_a_second_file(tmp_path: Path) -> None:
    target_dir = make_target(tmp_path / "target")
    target = read_target_config(target_dir)
    form = format_for("vllm", head_config("medusa", ttt_steps=2, num_layers=2, fc_bias=True), target)
    blocks = {f"blocks.{depth}.layers.{layer}" for depth in (0, 1) for layer in (0, 1)}
    tensors = shapes(form.tensors(random_head(form.head, target).state_dict()))
    assert tensors == {f"{block}.weight": [64, 64] for block in blocks} | {f"{block}.bias": [64] for block in blocks}
    form.add_target(tmp_path, target_dir)
    assert torch.equal(
        load_file(tmp_path / "lm_head.safetensors")["lm_head.weight"], load_frozen_parts(target_dir).lm_head
    )


def test_medusas_config_has_no_key_that_vllm_would_take_for_a_number_of_heads_or_layers(target: LlamaConfig) -> None:
    """`MedusaConfig.from_pretrained` of vLLM 0.32 renames every such key."""
    config = format_for("vllm", head_config("medusa", num_layers=2), target).config_json("bfloat16")
    counts = {key: value for key, value in config.items() if "num" in key and ("heads" in key or "layers" in key)}
    assert counts == {"num_heads": 4, "num_hidden_layers": 2}
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    assert (config["original_lm_head"], config["vocab_size"], config["hidden_size"]) == (True, 260, 64)


def test_dflash_is_a_qwen3_stack_whose_layer_ids_are_one_less_than_ours(target: LlamaConfig) -> None:
    head = head_config("dflash", num_layers=2, ttt_steps=7, mask_token_id=5)
    form = format_for("vllm", head, target)
    layer = {
        "input_layernorm.weight": [64],
        "post_attention_layernorm.weight": [64],
        "self_attn.q_norm.weight": [64],
        "self_attn.k_norm.weight": [64],
        **{f"self_attn.{part}_proj.weight": [64, 64] for part in "qkvo"},
        **{f"mlp.{part}_proj.weight": [96, 64] for part in ("gate", "up")},
        "mlp.down_proj.weight": [64, 96],
    }
    assert shapes(form.tensors(random_head(head, target).state_dict())) == {
        "fc.weight": [64, 192],
        "hidden_norm.weight": [64],
        "norm.weight": [64],
        **{f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()},
    }
    config = form.config_json("bfloat16")
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert config["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [0, 1, 2]}
    assert (config["block_size"], config["num_hidden_layers"]) == (8, 2)
    assert config["layer_types"] == ["full_attention"] * 2
    assert "rope_theta" in config["rope_parameters"], "must be written, because vLLM's default differs from Llama's"
    assert len(form.notes()) == 1 and not format_for("vllm", head_config("dflash"), target).notes()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_dspark_has_its_keys_at_the_top_level_and_every_tensor(
    target: LlamaConfig, engine: str, anchor_first: bool
) -> None:
    head = head_config("dspark", ttt_steps=7, markov_rank=16, mask_token_id=5, sample_from_anchor=anchor_first)
    form = format_for(engine, head, target)
    own = {
        "markov_head.markov_w1.weight": [260, 16],
        "markov_head.markov_w2.weight": [260, 16],
        "confidence_head.proj.weight": [1, 80],
        "confidence_head.proj.bias": [1],
    }
    found = shapes(form.tensors(random_head(head, target).state_dict()))
    assert own.items() <= found.items()
    dflash = head_config("dflash", ttt_steps=7)
    assert found.keys() - own.keys() == random_head(dflash, target).state_dict().keys()
    config = form.config_json("bfloat16")
    wanted = {
        **{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 7, "markov_rank": 16},
        **{"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True},
        **{"sample_from_anchor": anchor_first, "target_layer_ids": [0, 1, 2], "mask_token_id": 5},
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["max_position_embeddings"] == target.max_position_embeddings


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dflash2_has_the_keys_and_tensors_of_published_heads(target: LlamaConfig, engine: str) -> None:
    settings = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 5}
    form = format_for(engine, head_config("dflash2", ttt_steps=7, mask_token_id=5, **settings), target)
    found = shapes(form.tensors(random_head(form.head, target).state_dict()))
    own = {
        **{f"layers.0.{part}_conv.base_kernel": [2, 2, 64] for part in ("attention", "mlp")},
        **{f"layers.0.{part}_conv.kernel_projection.weight": [2 * 2 * 4, 64] for part in ("attention", "mlp")},
        **{f"candidate_selector.{part}_codebook": [260, 32] for part in ("predecessor", "successor")},
        "candidate_selector.hidden_projection.weight": [32, 64],
    }
    assert own.items() <= found.items()
    dflash = head_config("dflash", ttt_steps=7)
    assert found.keys() - own.keys() == random_head(dflash, target).state_dict().keys()
    config = form.config_json("bfloat16")
    assert (config["architectures"], config["block_size"]) == (["DFlash2DraftModel"], 8)
    assert settings | {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 1, 2]} == config["dflash_config"]


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_a_head_of_the_v2_runner_has_no_note_on_cpus_which_never_serve_it(target: LlamaConfig, name: str) -> None:
    mixed = {"num_layers": 2, "sliding_window": 9}  # one layer slides, the other does not
    (note,) = format_for("vllm", head_config(name, mask_token_id=5, **mixed), target).notes()
    assert "with its V2 runner alone, which needs a GPU" in note and "not with those of the V2 runner" in note


def test_layer_ids_are_ours_and_left_out_where_they_are_the_engines_default() -> None:
    target = target_config(num_hidden_layers=12)
    config = format_for("vllm", head_config("eagle3", capture_layers=[0, 5, 12]), target).config_json("bfloat16")
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 5, 12]}
    assert ids.items() <= config.items(), "llama.cpp's converter reads no other place"
    assert config["eagle_config"] == ids and config["num_aux_hidden_states"] == 3
    for default in (None, [2, 6, 9]):
        config = format_for("vllm", head_config("eagle3", capture_layers=default), target).config_json("bfloat16")
        assert "eagle_config" not in config and config["num_aux_hidden_states"] == 3


def test_the_launch_command_names_the_method_whatever_the_path(target: LlamaConfig) -> None:
    for name, method in (("mtp", "eagle"), ("eagle", "eagle"), ("eagle3", "eagle3")):
        words = shlex.split(format_for("vllm", head_config(name), target).launch("TARGET", Path("/DIR"), 5))
        assert words[:4] == ["vllm", "serve", "TARGET", "--speculative-config"]
        assert json.loads(words[4]) == {"method": method, "model": "/DIR", "num_speculative_tokens": 5}


def test_a_window_of_every_layer_that_vllm_gives_the_head_too_is_noted(target: LlamaConfig, tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512}
    windowed = AutoConfig.for_model("mistral", **settings, sliding_window=128)
    for name in ("mtp", "draft_model"):
        assert "sliding window of 128 tokens" in format_for("vllm", head_config(name), windowed).notes()[0]
    windowed.save_pretrained(tmp_path)
    (note,) = format_for("vllm", head_config("draft_model", init_from=str(tmp_path)), windowed).notes()
    assert "sliding window" not in note, "the draft model has a window of its own, which mtptrain applies too"
    assert format_for("sglang", head_config("eagle3"), windowed).notes() == []
    for other in (target, AutoConfig.for_model("mistral", **settings, sliding_window=512)):
        assert format_for("vllm", head_config("mtp"), other).notes() == []
