"""Tests that runs are planned for published models of many families, from their config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtptrain.planning.costs import target_costs
from mtptrain.planning.plan import make_plan
from mtptrain.target.families import read_target_config
from tests.conftest import make_config
from tests.families import EXACT, write_member

COMMON = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Qwen2.5-7B": (
        7.62,
        {
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1e6,
            "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 131072,
        },
    ),
    "DeepSeek-V3": (
        671.0,
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
            "num_nextn_predict_layers": 1, "rope_theta": 10000, "rope_scaling": YARN,
        },
    ),
    "gpt-oss-20b": (
        20.9,
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
            "rope_theta": 150000, "rope_scaling": YARN | {"factor": 32.0, "truncate": False},
        },
    ),
    "Qwen3-Next-80B-A3B": (
        79.7,
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
            "rope_theta": 1e7, "vocab_size": 151936, "max_position_embeddings": 262144,
        },
    ),
    "GLM-4.5-Air": (
        106.9,
        {
            "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
            "moe_intermediate_size": 1408, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5, "rope_theta": 1e6, "vocab_size": 151552, "max_position_embeddings": 131072,
            "num_nextn_predict_layers": 1,
        },
    ),
    "granite-3.3-8b": (
        8.17,
        {
            "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22, "logits_scaling": 16.0, "attention_multiplier": 0.0078125,
            "rope_theta": 1e7, "vocab_size": 49159, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        },
    ),
    "phi-4": (
        14.7,
        {
            "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
            "num_attention_heads": 40, "num_key_value_heads": 10, "rope_theta": 250000, "vocab_size": 100352,
            "max_position_embeddings": 16384, "sliding_window": None, "pad_token_id": 0,
        },
    ),
    "gemma-3-27b": (
        27.0,
        {
            "model_type": "gemma3", "tie_word_embeddings": True, "mm_tokens_per_image": 256,
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
                "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
                "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262208,
                "max_position_embeddings": 131072,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
            },
        },
    ),
}  # fmt: skip
"""The number of parameters of the language model, in billions, as published, and the settings."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_is_planned_for_a_published_model(tmp_path: Path, name: str) -> None:
    billions, settings = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | settings))
    assert target_costs(read_target_config(tmp_path)).num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    settings_of_run = ("hardware=h100_8", "hidden_states.backend=transformers", f"run_dir={tmp_path}/run")
    plan = make_plan(make_config(f"target.path={tmp_path}", *settings_of_run))
    assert 0 < plan.target.active_parameters <= plan.target.num_parameters and plan.head_parameters > 0


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-Next-80B-A3B", "GLM-4.5-Air"])
def test_a_training_of_the_published_mtp_module_is_planned(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON | PUBLISHED[name][1]))
    settings = ("head=native_mtp", "head.start_from_target=false", "hidden_states.backend=transformers")
    plan = make_plan(make_config(f"target.path={tmp_path}", "hardware=h100_8", f"run_dir={tmp_path}/run", *settings))
    assert 1e9 < plan.head_parameters < plan.target.num_parameters / 20


@pytest.mark.parametrize("family", ["mimo_v2_flash", "gpt_oss", "gemma2"])
def test_a_training_with_a_window_sinks_or_a_soft_cap_is_planned(tmp_path: Path, family: str) -> None:
    write_member(tmp_path, *EXACT[family])
    settings = ("head=native_mtp", "head.start_from_target=false", "hidden_states.backend=transformers")
    plan = make_plan(make_config(f"target.path={tmp_path}", f"run_dir={tmp_path}/run", *settings))
    assert plan.head_parameters > 0
