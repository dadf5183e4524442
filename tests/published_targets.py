"""Lists the recipes' targets with the sizes that are published in their config.json."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class PublishedTarget:
    name: str
    """The name on the hub."""
    model_type: str
    num_parameters: float
    """The published number, with at most three digits."""
    settings: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.settings)


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": False}
    return {**sizes, **heads_, "head_dim": 128, **others}


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA3: dict[str, Any] = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_parameters": _LLAMA3_ROPE}
_LONGER = {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0}}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "vocab_size": 102_400, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163_840,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
PUBLISHED_TARGETS = {name: PublishedTarget(*target) for name, target in {
    "llama3_2_1b": (
        "meta-llama/Llama-3.2-1B-Instruct", "llama", 1.24e9, _sizes(2048, 8192, 16, 32, 8, **_LLAMA3 | _LONGER),
    ),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", "llama", 8.03e9, _sizes(4096, 14_336, 32, 32, 8, **_LLAMA3)),
    "llama3_3_70b": ("meta-llama/Llama-3.3-70B-Instruct", "llama", 70.6e9, _sizes(8192, 28_672, 80, 64, 8, **_LLAMA3)),
    "qwen3_8b": ("Qwen/Qwen3-8B", "qwen3", 8.2e9, _sizes(4096, 12_288, 36, 32, 8, **_QWEN3)),
    "qwen3_32b": ("Qwen/Qwen3-32B", "qwen3", 32.8e9, _sizes(5120, 25_600, 64, 64, 8, **_QWEN3)),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", "qwen3_moe", 30.5e9, _sizes(2048, 6144, 48, 32, 4, **_QWEN3, **_EXPERTS)),
    "deepseek_v2_lite": (
        "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek_v2", 15.7e9,
        _sizes(2048, 10_944, 27, 16, 16, **_DEEPSEEK_V2_LITE),
    ),
}.items()}  # fmt: skip
"""Published targets by the name of their file in recipes/target/."""
