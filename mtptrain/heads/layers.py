"""Layers of the heads: RMSNorm, RoPE, attention projections, SwiGLU, and their sizes and initial weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mtptrain.settings.heads import LayerConfig
from mtptrain.target.families import STATIC_ROPE_TYPES, head_rope_parameters, key_heads, mlp_size
from mtptrain.utils.errors import UserError, refusing

SERVED_HEAD_DIMS = (64, 128)
"""Head dims that a head may have: the attention backends of all engines have kernels for both."""


class RmsNorm(nn.Module):
    """RMSNorm that computes the mean square in fp32, as engines do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., heads, head_dim] by cos and sin [..., 1, head_dim], pairing dimensions i and i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SwiGlu(nn.Module):
    """Gated MLP without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Rope:
    """The rotary embedding of a head, including its scaling, with the head's own head dim.

    This is neither a module nor a buffer, so that casting a head to bf16 does not round its frequencies.
    """

    def __init__(self, head_dim: int, rope_parameters: Mapping[str, Any], max_positions: int) -> None:
        """Build the frequencies. Raises UserError for a type that transformers or engines cannot compute."""
        must = "head.rope_parameters: must be a RoPE that transformers computes, and the same for all lengths"
        with refusing(f"{must}, unlike {dict(rope_parameters)}", "correct it"):  # the target's have been read before
            if rope_parameters.get("rope_type") not in STATIC_ROPE_TYPES:
                raise ValueError(f"rope_type must be one of {', '.join(STATIC_ROPE_TYPES)}")
            if rope_parameters.get("partial_rotary_factor", 1) != 1:
                raise ValueError("partial_rotary_factor must be 1, because heads rotate whole attention heads")
            sizes: dict[str, Any] = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
            config = LlamaConfig(**sizes, max_position_embeddings=max_positions, rope_parameters=dict(rope_parameters))
            rotary = LlamaRotaryEmbedding(config)
            self.theta = float(rope_parameters["rope_theta"])
        self.inv_freq, self.scaling = rotary.inv_freq.float(), float(rotary.attention_scaling)  # f32[head_dim / 2]

    def factors(self) -> torch.Tensor:
        """Returns the length of each wave divided by its length without RoPE scaling, f32[head_dim / 2]."""
        size = 2 * len(self.inv_freq)
        unscaled = self.theta ** -(torch.arange(0, size, 2, dtype=torch.int64).float() / size)
        return unscaled / self.inv_freq.cpu()

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin [..., 1, head_dim] for positions [...]."""
        self.inv_freq = self.inv_freq.to(positions.device, non_blocking=True)
        angles = positions[..., None, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


@dataclass(frozen=True)
class HeadDims:
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope: Mapping[str, Any]


def head_dims(config: LayerConfig, target_config: PreTrainedConfig) -> HeadDims:
    """Returns the layer sizes of a head for a target.

    Without a head dim in the settings, it is hidden size / heads, as in engines if the head's file format stores none.
    """
    hidden_size, head_dim = target_config.hidden_size, getattr(config, "head_dim", None)
    heads = config.num_attention_heads or _default_heads(hidden_size, target_config.num_attention_heads)
    default_kv_heads = key_heads(target_config) if heads % key_heads(target_config) == 0 else heads
    kv_heads = config.num_key_value_heads or default_kv_heads
    if (dim := head_dim or hidden_size / heads) not in SERVED_HEAD_DIMS:
        counts = [str(hidden_size // served) for served in reversed(SERVED_HEAD_DIMS) if hidden_size % served == 0]
        advice = "head.head_dim=64" if hasattr(config, "head_dim") else "head=eagle3 head.head_dim=64"
        if head_dim is None and counts:
            advice = f"head.num_attention_heads to {' or '.join(counts)}"
        raise UserError(
            f"head.{'num_attention_heads' if head_dim is None else 'head_dim'}: the head dim must be one of "
            f"{SERVED_HEAD_DIMS}, which all engines have kernels for, but is {dim:g} with {heads} heads and a hidden "
            f"size of {hidden_size}; set {advice}"
        )
    if heads % kv_heads:
        raise UserError(
            f"head.num_key_value_heads: must divide the {heads} attention heads, but is {kv_heads}; set "
            "head.num_key_value_heads"
        )
    intermediate_size = config.intermediate_size or mlp_size(target_config)
    rope_parameters = config.rope_parameters or head_rope_parameters(target_config)
    return HeadDims(hidden_size, heads, kv_heads, int(dim), intermediate_size, rope_parameters)


def _default_heads(hidden_size: int, target_heads: int) -> int:
    if hidden_size % target_heads == 0 and hidden_size // target_heads in SERVED_HEAD_DIMS:
        return target_heads
    return hidden_size // 128 if hidden_size % 128 == 0 else max(1, hidden_size // 64)


class Attention(nn.Module):
    """Projections and RoPE of grouped-query attention. The caller decides which keys a query sees."""

    def __init__(self, input_size: int, dims: HeadDims, target_config: PreTrainedConfig, bias: bool = False) -> None:
        """Build the projections. `bias` adds biases to those of queries, keys and values."""
        super().__init__()
        query_size, kv_size = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
        self.head_dim = dims.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(query_size, dims.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        """Norms of each query head and of each key head before the rotation, in heads that have them."""
        self.rope = Rope(dims.head_dim, dims.rope, target_config.max_position_embeddings)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the rotated queries [..., heads, head_dim] of x [..., input size]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), *self.rope.tables(positions, x.dtype))

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotated keys and the values [..., kv heads, head_dim]."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), *self.rope.tables(positions, x.dtype))
        return key, self._heads(self.v_proj(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def initialise(head: nn.Module, hidden_size: int, target_layers: int) -> None:
    """Draw all linear weights from normal distributions with std H ** -0.5. Biases start at zero.

    Layers that write to the residual stream get GPT-2's smaller std instead, for a stack of `target_layers` + 1 layers.
    """
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            is_residual_write = name.endswith(("o_proj", "down_proj"))
            std = 0.02 / (2 * (target_layers + 1)) ** 0.5 if is_residual_write else hidden_size**-0.5
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
