"""The exported directory: exact keys, shapes and columns, and the same proposals after reloading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.export import check_directory_name, check_not_quantised, check_vllm, propose, reload_vllm, write_vllm
from mtptrain.head_files import build_head, load_head, save_head
from mtptrain.heads.mtp import MtpHead, mtp_dims
from mtptrain.target import load_target, read_target_config
from tests.conftest import make_target, run_program

CONFIG = MtpHead.Config()


@pytest.fixture
def exported(tmp_path: Path, tiny_target: Path) -> Path:
    torch.manual_seed(0)
    target_config = read_target_config(tiny_target)
    write_vllm(tmp_path / "vllm", build_head(CONFIG, target_config), CONFIG, target_config)
    return tmp_path / "vllm"


def test_the_directory_holds_exactly_the_tensors_that_vllm_reads(exported: Path) -> None:
    """Names and shapes from vllm/model_executor/models/deepseek_eagle.py 0.32: H=64, I=96, one head and one kv head of 64."""
    assert {name: list(tensor.shape) for name, tensor in load_file(exported / "model.safetensors").items()} == {
        "enorm.weight": [64],
        "hnorm.weight": [64],
        "norm.weight": [64],
        "fc.weight": [64, 128],
        "layers.0.input_layernorm.weight": [64],
        "layers.0.post_attention_layernorm.weight": [64],
        "layers.0.self_attn.qkv_proj.weight": [192, 64],
        "layers.0.self_attn.o_proj.weight": [64, 64],
        "layers.0.mlp.gate_proj.weight": [96, 64],
        "layers.0.mlp.up_proj.weight": [96, 64],
        "layers.0.mlp.down_proj.weight": [64, 96],
    }


def test_the_config_names_the_class_and_copies_the_targets_rope(exported: Path, tiny_target: Path) -> None:
    config, target_config = json.loads((exported / "config.json").read_text()), read_target_config(tiny_target)
    assert config["architectures"] == ["EagleDeepSeekMTPModel"]
    assert config["model_type"] == "llama"
    assert config["qk_nope_head_dim"] == config["qk_rope_head_dim"] == config["n_routed_experts"] == 0
    assert config["first_k_dense_replace"] > target_config.num_hidden_layers
    assert config["rope_parameters"] == target_config.rope_parameters
    assert config["max_position_embeddings"] == 512 and config["vocab_size"] == 260 and config["dtype"] == "float32"


def test_query_key_and_value_are_fused_in_this_order_and_embedding_columns_come_first(exported: Path, tiny_target: Path) -> None:
    torch.manual_seed(0)
    head = build_head(CONFIG, read_target_config(tiny_target))
    tensors = load_file(exported / "model.safetensors")
    fused = tensors["layers.0.self_attn.qkv_proj.weight"]
    for part, tensor in zip("qkv", fused.split(64), strict=True):
        assert torch.equal(tensor, head.state_dict()[f"{part}_proj.weight"])
    embeddings, hidden = torch.randn(2, 64), torch.zeros(2, 64)
    assert torch.allclose(head.eh_proj(torch.cat([embeddings, hidden], -1)), embeddings @ tensors["fc.weight"][:, :64].T, atol=1e-5)


def test_the_reloaded_head_proposes_the_same_and_a_damaged_one_does_not(exported: Path, tiny_target: Path) -> None:
    torch.manual_seed(0)
    target, prompts = load_target(tiny_target, torch.float32, torch.device("cpu")), [[1, 2, 3], [50, 60, 70, 80, 90]]
    head = build_head(CONFIG, target.config).eval()
    ours = propose(target, head, prompts)
    theirs = propose(target, reload_vllm(exported, CONFIG, target.config), prompts)
    assert len(ours) > 5 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    tensors = load_file(exported / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, 1)  # hidden columns first
    save_file(tensors, exported / "model.safetensors")
    broken = propose(target, reload_vllm(exported, CONFIG, target.config), prompts)
    assert not all(torch.equal(a, b) for a, b in zip(ours, broken, strict=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"hnorm\.weight must be of shape \(64,\), but is absent; vLLM would serve random weights: export again"),
        ("unknown", r"extra\.weight must be absent, but is of shape \(3,\)"),
        ("shape", r"fc\.weight must be of shape \(64, 128\), but is of shape \(64, 64\)"),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_an_error(exported: Path, tiny_target: Path, change: str, message: str) -> None:
    tensors = load_file(exported / "model.safetensors")
    if change == "missing":
        del tensors["hnorm.weight"]
    elif change == "unknown":
        tensors["extra.weight"] = torch.zeros(3)
    else:
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_vllm(exported, CONFIG, read_target_config(tiny_target))


@pytest.mark.parametrize("name", ["eagle-head", "my_eagle3", "DFlash", "dspark"])
def test_a_directory_whose_name_switches_vllms_method_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"export\.output_dir: the path must not contain eagle- or .* by which vLLM chooses"):
        check_directory_name(tmp_path / name / "vllm")


def test_a_quantised_target_is_refused(tiny_target: Path) -> None:
    config = read_target_config(tiny_target)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"target\.path: the target of a vLLM export must not be quantised, but .* 'fp8'"):
        check_not_quantised(config)


@pytest.mark.parametrize(
    ("hidden_size", "heads", "expected"),
    [(2560, 32, 20), (5120, 64, 40), (4096, 32, 32), (256, 4, 4), (64, 1, 1)],
)
def test_the_heads_head_dim_is_one_that_engines_have_kernels_for(
    tmp_path: Path, hidden_size: int, heads: int, expected: int
) -> None:
    """Trap: hidden size over heads is 80 for Qwen3-4B and Qwen3-32B."""
    make_target(tmp_path, num_attention_heads=1)
    target_config = read_target_config(tmp_path)
    target_config.hidden_size, target_config.num_attention_heads = hidden_size, heads
    assert mtp_dims(CONFIG, target_config).num_attention_heads == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MtpHead.Config(num_attention_heads=2),
            r"head\.num_attention_heads: the head dim \(hidden size 64 / heads\) must be one of",
        ),
        (MtpHead.Config(num_key_value_heads=2), r"head\.num_key_value_heads: must divide the 1 attention heads, but is 2"),
    ],
)
def test_sizes_that_no_engine_serves_are_refused(tiny_target: Path, config: MtpHead.Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(config, read_target_config(tiny_target))


def test_a_head_of_other_settings_or_of_another_target_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    save_head(tmp_path / "head", build_head(CONFIG, target_config).state_dict(), CONFIG, {"step": 3})
    with pytest.raises(
        ValueError, match=r"the head's settings must be those of the config, but differ in head\.ttt_steps \(4 there, 2 here\)"
    ):
        load_head(tmp_path / "head", MtpHead.Config(ttt_steps=2), target_config, None, torch.device("cpu"))
    other = read_target_config(make_target(tmp_path / "target", intermediate_size=80))
    with pytest.raises(ValueError, match=r"mlp\.\w+_proj\.weight must be of shape .* for this target, but is"):
        load_head(tmp_path / "head", CONFIG, other, None, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match=r"must hold a trained head, but has no head\.json; run mtptrain\.train first"):
        load_head(tmp_path / "none", CONFIG, target_config, None, torch.device("cpu"))


def test_export_before_training_says_what_to_run(tmp_path: Path, tiny_target: Path) -> None:
    result = run_program("mtptrain.export", f"run_dir={tmp_path}/run", f"target.path={tiny_target}")
    assert result.returncode != 0
    assert "must hold a trained head, but has no head.json; run mtptrain.train first" in result.stderr
    assert not (tmp_path / "run/export").exists()
