"""Lists tiny members of the model families of transformers, with their own kinds of layers, masks and norms."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import mtptrain.target.mimo  # noqa: F401 - registers the family
from tests.conftest import make_tokenizer

LAYERS, WINDOW = 4, 16
SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": None,
    "initializer_range": 0.15,
}  # fmt: skip
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
WINDOWS = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
}  # fmt: skip
ERNIE_EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
INDEX = {"index_n_heads": 4, "index_head_dim": 32}
GEMMA3 = {**WINDOWS, "query_pre_attn_scalar": 16}
GEMMA4 = {**WINDOWS, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
LLAMA4 = {
    "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 64,
    "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0], "floor_scale": 8,
}  # fmt: skip

EXACT: dict[str, tuple[str, dict[str, Any]]] = {name: (name.split()[0], settings) for name, settings in {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {},
    "mimo": {},
    "ministral": WINDOWS,
    "ministral3": {},
    "phi3": {"sliding_window": WINDOW},
    "phi": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "seed_oss": {},
    "smollm3": {},
    "exaone4": WINDOWS,
    "apertus": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "gpt2": {},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25, **WINDOWS},
    "granite": {**GRANITE, "logits_scaling": 8.0},
    "gemma2": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_text with embeddings per layer and shared keys": {
        **GEMMA4, "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260,
        "num_kv_shared_layers": 2,
    },
    "glm": {},
    "glm4": {},
    # mixtures of experts
    "mixtral": LOCAL_EXPERTS,
    "qwen2_moe": {**EXPERTS, **SHARED_EXPERT},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "num_local_experts": 8, **WINDOWS},
    "llama4_text": LLAMA4,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {**GRANITE, "logits_scaling": 6.0, **LOCAL_EXPERTS},
    "phimoe": {**LOCAL_EXPERTS, "sliding_window": None},
    "dots1": ROUTED,
    "glm4_moe": ROUTED,
    "hy_v3": {**EXPERTS, **ROUTED},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
    "ernie4_5_moe": ERNIE_EXPERTS,
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    "mimo_v2_flash": {**ROUTED, "sliding_window": WINDOW, "v_head_dim": 16, "swa_num_key_value_heads": 2},
    # latent attention
    "deepseek_v2": {**LATENT, **ROUTED, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, **ROUTED},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "minicpm3": LATENT,
    # layers that keep states
    "qwen3_next": {**EXPERTS, **DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, **SHARED_EXPERT},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **LATENT, **ROUTED, "q_lora_rank": None, "layer_types": DELTA["layer_types"],
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
    },
    "bailing_hybrid": {**ROUTED, **LATENT, "layer_types": DELTA["layer_types"]},
    "granitemoehybrid": {
        **GRANITE, "logits_scaling": 6.0, **LOCAL_EXPERTS, **MAMBA, "shared_intermediate_size": 64, "mamba_expand": 2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 2, "expand": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 0.3, "embedding_multiplier": 5.6},
    "jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [2]},
    "lfm2": {"layer_types": ["conv", "conv", FULL, "conv"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "conv", FULL, "conv"]},
}.items()}  # fmt: skip
"""Language models that mtptrain runs as transformers does: the family of each, which its name begins with, and its
settings beside `SIZES`."""

KEEPS_STATES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("granitemoehybrid", "nemotron_h", "falcon_h1", "jamba", "bamba", "lfm2", "lfm2_moe"),
)

WITHOUT = {
    "mamba2": ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    "gpt_neox": ("num_key_value_heads", "head_dim"),
    "gpt2": ("num_key_value_heads", "head_dim", "intermediate_size"),
}
"""Sizes that a family does not have."""

SPARSE = {**LATENT, **ROUTED, **INDEX, "index_topk": 2048}
DEEPSEEK_V4 = {"num_key_value_heads": 1, "head_dim": 32, "o_lora_rank": 32, "index_topk": 64, "sliding_window": WINDOW}
LONGCAT = {"num_layers": 2, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v32": ("deepseek_v32", SPARSE, "the forward of a text over a cache must run for a deepseek_v32"),
    "deepseek_v4": (
        "deepseek_v4", {**LATENT, **ROUTED, **INDEX, **DEEPSEEK_V4}, "a model must run with random states after its la",
    ),
    "longcat_flash": ("longcat_flash", {**LATENT, **ROUTED, **LONGCAT}, "num_hidden_layers must be the length of a li"),
    "mamba2": ("mamba2", MAMBA2, "the target must have the settings vocab_size, .* a mamba2 has no num_attention_head"),
    "opt with a projection": (
        "opt", {"ffn_dim": 128, "word_embed_proj_dim": 32},
        "lm_head must read what the final norm returns, but in the family 'opt' it reads something else",
    ),
    "nemotron": ("nemotron", {}, "a model must pass its arguments on to its attention"),
}  # fmt: skip
"""Language models that mtptrain does not run, one for each reason that it gives."""

TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
VISION = {**TOWER, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64}
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
PROJECTED = {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TOKENS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
IMAGE = {"image_token_index": 10, "boi_token_index": 12, "eoi_token_index": 13}
IMAGE_IDS = {"audio_config": None, "image_token_id": 10, "boi_token_id": 12, "eoi_token_id": 13}

IMAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {"text_config": {**SIZES, **text}, "vision_config": vision, **whole})
    for name, text, vision, whole in (
        ("gemma3", GEMMA3, {**SIGLIP, "model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4, **IMAGE}),
        ("gemma4", {**GEMMA4, "pad_token_id": 0}, {**SIGLIP, "head_dim": 16, "num_key_value_heads": 2}, IMAGE_IDS),
        (
            "qwen3_vl", {"rope_parameters": {**AXES, "mrope_interleaved": True}},
            {**VISION, "deepstack_visual_indexes": [0]}, TOKENS,
        ),
        ("qwen2_5_vl", {"rope_parameters": AXES}, {**TOWER, "fullatt_block_indexes": [0], "window_size": 16}, TOKENS),
        ("qwen3_5", DELTA, VISION, TOKENS),
        (
            "mistral3", {"model_type": "ministral3"}, {**SIGLIP, "model_type": "pixtral", "head_dim": 16},
            {"image_token_index": 10},
        ),
        ("llama4", LLAMA4, {**SIGLIP, **PROJECTED}, IMAGE),
        (
            "kimi_k25", {**LATENT, **ROUTED, "model_type": "deepseek_v3"},
            {name: SIGLIP[name] for name in SIGLIP if name != "image_size"}, {},
        ),
    )
}  # fmt: skip
"""Image+text models, whose language model is a target."""


def write_member(directory: Path, family: str, settings: dict[str, Any]) -> Path:
    """Write a random language model with the tokenizer of `make_target`."""
    sizes = {name: size for name, size in SIZES.items() if name not in WITHOUT.get(family, ())}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **settings}))
    return _write(directory, model)


def write_image_model(directory: Path, family: str, settings: dict[str, Any], is_tied: bool = False) -> Path:
    """Write a random image+text model with the tokenizer of `make_target`."""
    config = AutoConfig.for_model(family, **settings, tie_word_embeddings=is_tied)
    config.tie_word_embeddings = is_tied
    return _write(directory, AutoModelForImageTextToText.from_config(config))


@torch.no_grad()
def _write(directory: Path, model: PreTrainedModel) -> Path:
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if "norm" in name.lower() and kind == "weight" and parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)  # leaving out a norm must change the results
        elif kind == "bias" or "sinks" in name:
            parameter.uniform_(-0.3, 0.3)
        elif not parameter.isfinite().all():  # some families leave values to be loaded
            parameter.normal_(0, 0.1)
        elif parameter.ndim >= 2 and parameter.std() < 0.02:
            parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
