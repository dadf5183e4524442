"""Head `mtp`: one decoder layer with every RMSNorm in place, reused at all depths.

x = eh_proj[enorm(e); hnorm(h)], a full pre-norm Llama layer, final norm, the target's frozen lm_head; the post-norm state is fed
back. DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.2, with one module for all depths.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.base import Head, HeadConfig, Packing
from mtptrain.heads.layers import RmsNorm, Rope, SwiGlu, cached_attention, depth_attention, rotate
from mtptrain.target import PositionCache

SERVED_HEAD_DIMS = (64, 128)
"""Head dims that attention backends of the engines have kernels for."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class MtpDims:
    """Sizes of the head's layer; H = num_attention_heads * head_dim, as engines derive head_dim from the other two."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


class MtpHead(Head):
    """RMSNorm-restored multi-token-prediction head."""

    @dataclass
    class Config(HeadConfig):
        """Sizes are the target's unless set."""

        name: str = "mtp"
        num_attention_heads: int | None = None
        """The target's where that gives a head dim of 64 or 128, else hidden size / 128 or / 64."""
        num_key_value_heads: int | None = None
        intermediate_size: int | None = None

    def __init__(self, config: Config, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = mtp_dims(config, target_config)
        hidden_size, eps = dims.hidden_size, target_config.rms_norm_eps
        self.dims = dims
        self.enorm = RmsNorm(hidden_size, eps)
        self.hnorm = RmsNorm(hidden_size, eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # columns of the embedding first
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, dims.num_key_value_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, dims.num_key_value_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = SwiGlu(hidden_size, dims.intermediate_size)
        self.norm = RmsNorm(hidden_size, eps)
        self.rope = Rope(dims.head_dim, target_config)
        self._initialise(target_config.num_hidden_layers)

    def _initialise(self, target_layers: int) -> None:
        """GPT-2's: normal of 0.02, and residual writes smaller by the depth of the whole stack."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                is_residual_write = name.endswith(("o_proj", "down_proj"))
                std = 0.02 / (2 * (target_layers + 1)) ** 0.5 if is_residual_write else self.dims.hidden_size**-0.5
                nn.init.normal_(module.weight, std=std)

    def forward(self, hidden_states: torch.Tensor, embeddings: torch.Tensor, packing: Packing) -> torch.Tensor:
        """States of every depth [T, N, H]; see `Head.forward`."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys.append(key)
            values.append(value)
            return depth_attention(query, keys, values, packing)

        states = []
        for depth, depth_embeddings in enumerate(embeddings):
            hidden_states = self._layer(hidden_states, depth_embeddings, packing.positions + depth, attend)
            states.append(hidden_states)
        return torch.stack(states)

    def decode(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, cache: PositionCache
    ) -> torch.Tensor:
        """States [B, S, H] of one step; see `Head.decode`."""
        return self._layer(hidden_states, embeddings, positions, lambda q, k, v: cached_attention(q, k, v, positions, cache))

    def _layer(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One depth, whatever the leading shape [..., H] and the keys that `attend` looks at."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))  # [..., H]
        normed = self.input_layernorm(x)
        query, key, value = (
            proj(normed).unflatten(-1, (-1, self.dims.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # [..., heads, head_dim]
        cos, sin = self.rope.tables(positions, x.dtype)
        attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.o_proj(attended.flatten(-2))
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = self.norm(x)
        return out


def to_vllm(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of vLLM's `EagleDeepSeekMTPModel` (vllm/model_executor/models/deepseek_eagle.py, 0.32) from the head's.

    query, key and value are one fused tensor there, and embeddings and lm_head stay away, so that the target's are shared.
    """
    renamed = {vllm_name: state[name] for name, vllm_name in _VLLM_NAMES.items()}
    return renamed | {_VLLM_QKV: torch.cat([state[f"{part}_proj.weight"] for part in "qkv"])}


def from_vllm(tensors: dict[str, torch.Tensor], dims: MtpDims) -> dict[str, torch.Tensor]:
    """The inverse of `to_vllm`."""
    state = {name: tensors[vllm_name] for name, vllm_name in _VLLM_NAMES.items()}
    kv_size = dims.num_key_value_heads * dims.head_dim
    parts = tensors[_VLLM_QKV].split([dims.hidden_size, kv_size, kv_size])
    return state | {f"{part}_proj.weight": tensor for part, tensor in zip("qkv", parts, strict=True)}


def vllm_config(dims: MtpDims, target_config: PreTrainedConfig, dtype: str) -> dict[str, object]:
    """`config.json` beside the tensors of `to_vllm`."""
    return {
        "architectures": ["EagleDeepSeekMTPModel"],
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": dims.num_attention_heads,
        "num_key_value_heads": dims.num_key_value_heads,
        "max_position_embeddings": target_config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": target_config.rms_norm_eps,
        "tie_word_embeddings": True,  # whatever the target does: the engine shares both of its tensors
        "rope_parameters": target_config.rope_parameters,
        "dtype": dtype,
        # The class is DeepSeek's: no experts (dense below first_k_dense_replace), and no latent attention (both dims 0).
        "n_routed_experts": 0,
        "first_k_dense_replace": 100_000,
        "moe_layer_freq": 1,
        "n_group": 1,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
    }


_VLLM_NAMES = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "fc.weight",
    "input_layernorm.weight": "layers.0.input_layernorm.weight",
    "o_proj.weight": "layers.0.self_attn.o_proj.weight",
    "post_attention_layernorm.weight": "layers.0.post_attention_layernorm.weight",
    "mlp.gate_proj.weight": "layers.0.mlp.gate_proj.weight",
    "mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "mlp.down_proj.weight": "layers.0.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
}
_VLLM_QKV = "layers.0.self_attn.qkv_proj.weight"


def mtp_dims(config: MtpHead.Config, target_config: PreTrainedConfig) -> MtpDims:
    """Sizes of the head for a target.

    Raises:
        ValueError: no engine serves a head of these sizes.
    """
    hidden_size = target_config.hidden_size
    heads = config.num_attention_heads or _default_heads(hidden_size, target_config.num_attention_heads)
    default_kv_heads = target_config.num_key_value_heads if heads % target_config.num_key_value_heads == 0 else heads
    kv_heads = config.num_key_value_heads or default_kv_heads
    if hidden_size % heads or hidden_size // heads not in SERVED_HEAD_DIMS:
        raise ValueError(
            f"head.num_attention_heads: the head dim (hidden size {hidden_size} / heads) must be one of {SERVED_HEAD_DIMS}, which "
            f"engines have kernels for, but is {hidden_size / heads:g} with {heads} heads; set head.num_attention_heads to "
            f"{hidden_size // 128 or 1} or {hidden_size // 64 or 1}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"head.num_key_value_heads: must divide the {heads} attention heads, but is {kv_heads}; set head.num_key_value_heads"
        )
    return MtpDims(hidden_size, heads, kv_heads, hidden_size // heads, config.intermediate_size or target_config.intermediate_size)


def _default_heads(hidden_size: int, target_heads: int) -> int:
    if hidden_size % target_heads == 0 and hidden_size // target_heads in SERVED_HEAD_DIMS:
        return target_heads
    return hidden_size // 128 if hidden_size % 128 == 0 else max(1, hidden_size // 64)
