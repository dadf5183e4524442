"""Tests that directories for SGLang have the names, shapes and settings of its 0.5.23 source."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from mtptrain.engines.table import format_for
from tests.mtptrain.engines.conftest import head_config, random_head, shapes, target_config
from tests.mtptrain.engines.test_vllm import LAYER

MIMO = "model.mtp_layers.0."


def test_mtp_has_the_tensors_of_mimo_mtp(target: LlamaConfig) -> None:
    form = format_for("sglang", head_config("mtp"), target)
    tensors = form.tensors(random_head(form.head, target).state_dict())
    norms = {f"{MIMO}{name}_layernorm.weight": [64] for name in ("token", "hidden", "final")}
    biases = {f"{MIMO}self_attn.{part}_proj.bias": [64] for part in "qkv"}
    layer = {MIMO + name: shape for name, shape in LAYER.items()}
    assert shapes(tensors) == {**norms, **biases, **layer, MIMO + "input_proj.weight": [64, 128]}
    assert all(tensor.count_nonzero() == 0 for name, tensor in tensors.items() if name.endswith(".bias"))


def test_columns_of_the_hidden_state_come_first_in_mimo(target: LlamaConfig) -> None:
    """In every other format, the columns of the embedding come first."""
    form = format_for("sglang", head_config("mtp"), target)
    head = random_head(form.head, target)
    weight = form.tensors(head.state_dict())[MIMO + "input_proj.weight"]
    embedding, hidden = torch.randn(2, 64)
    ours, theirs = torch.cat([embedding, hidden]), torch.cat([hidden, embedding])
    assert torch.allclose(head.state_dict()["eh_proj.weight"] @ ours, weight @ theirs, atol=1e-4)
    assert not torch.allclose(head.state_dict()["eh_proj.weight"] @ ours, weight @ ours, atol=1e-4)


def test_the_norms_of_mimo_are_those_of_what_they_read(target: LlamaConfig) -> None:
    form = format_for("sglang", head_config("mtp"), target)
    state = random_head(form.head, target).state_dict()
    tensors = form.tensors(state)
    for theirs, ours in (("token", "enorm"), ("hidden", "hnorm"), ("final", "norm")):
        assert torch.equal(tensors[f"{MIMO}{theirs}_layernorm.weight"], state[f"{ours}.weight"])


def test_mtp_is_a_qwen2_layer_with_its_head_dim_and_a_note_on_position_0() -> None:
    target = target_config(hidden_size=256, num_attention_heads=8, head_dim=80)  # head mtp has 2 heads of 128
    form = format_for("sglang", head_config("mtp"), target)
    config = form.config_json("bfloat16")
    assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
    assert config["num_nextn_predict_layers"] == config["num_hidden_layers"] == 1
    assert config["head_dim"] == 128 and config["num_attention_heads"] == 2
    assert not config["tie_word_embeddings"] and "position 0" in form.notes()[0]


def test_eagle_has_a_bias_of_zeros_and_a_name_of_its_own(target: LlamaConfig) -> None:
    form = format_for("sglang", head_config("eagle"), target)
    tensors = form.tensors(random_head(form.head, target).state_dict())
    layer = {f"layers.0.{name}": shape for name, shape in LAYER.items() if name != "input_layernorm.weight"}
    assert shapes(tensors) == {"fc.weight": [64, 128], "fc.bias": [64], **layer}
    assert tensors["fc.bias"].count_nonzero() == 0
    config = form.config_json("bfloat16")
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and not config["tie_word_embeddings"]


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 96, "norm_output": True}, {"fc_norm": True}])
def test_eagle3_is_vllms_directory_but_for_the_layer_ids(target: LlamaConfig, settings: dict[str, object]) -> None:
    config = head_config("eagle3", **settings)
    state = random_head(config, target).state_dict()
    ours, theirs = (format_for(engine, config, target) for engine in ("sglang", "vllm"))
    assert shapes(ours.tensors(state)) == shapes(theirs.tensors(state))
    assert "draft_vocab_size" in ours.config_json("bfloat16"), "SGLang reads the attribute without a default"
    different = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    top_level = theirs.config_json("bfloat16")
    top_level.pop("eagle_aux_hidden_state_layer_ids")  # SGLang does not read it there
    assert ours.config_json("bfloat16") == top_level | different


@pytest.mark.parametrize(
    ("model_type", "layers", "ids"),
    [
        ("llama", [1, 5, 11], [0, 4, 10]),
        ("qwen3", [3, 5, 11], [2, 4, 10]),
        ("llama", [2, 6, 9], None),
        ("llama", None, None),
        ("deepseek_v2", [2, 5, 11], [1, 4, 10]),
        ("deepseek_v2", [3, 5, 11], [3, 5, 11]),
        ("deepseek_v3", [3, 5, 11], [3, 5, 11]),
        ("glm4_moe_lite", [3, 5, 11], [3, 5, 11]),
    ],
)
def test_layer_ids_are_one_less_than_ours_and_left_out_where_they_are_the_default(
    model_type: str, layers: list[int] | None, ids: list[int] | None
) -> None:
    """SGLang adds one to the ids of a config, but not to its default ids.

    Its DeepSeek class adds one only if the first id is 1.
    """
    target = AutoConfig.for_model(
        model_type, num_hidden_layers=12, hidden_size=128, num_attention_heads=1, num_key_value_heads=1
    )
    config = format_for("sglang", head_config("eagle3", capture_layers=layers), target).config_json("bfloat16")
    assert config.get("eagle_config") == (None if ids is None else {"eagle_aux_hidden_state_layer_ids": ids})


def test_the_launch_command_asks_for_a_chain_of_k_drafts(target: LlamaConfig) -> None:
    for name, algorithm in (("mtp", "EAGLE"), ("eagle", "EAGLE"), ("eagle3", "EAGLE3")):
        assert format_for("sglang", head_config(name), target).launch("TARGET", Path("/DIR"), 3) == (
            f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
            "--speculative-draft-model-path /DIR --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4"
        )


def test_the_launch_command_of_a_block_drafter_leaves_its_one_step_to_sglang(target: LlamaConfig) -> None:
    for name, algorithm in (("dflash", "DFLASH"), ("dflash2", "DFLASH"), ("dspark", "DSPARK")):
        assert format_for("sglang", head_config(name), target).launch("TARGET", Path("/DIR"), 3) == (
            f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
            "--speculative-draft-model-path /DIR --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
