"""Layers against independent references."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtptrain.heads.attention import Packing, dense_depth_attention, depth_attention, rotate
from mtptrain.heads.layers import RmsNorm, Rope

ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}


def inputs(num_tokens: int, depths: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(depths)

    def leaf(heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, 64, generator=generator).requires_grad_()

    return leaf(4), [leaf(2) for _ in range(depths)], [leaf(2) for _ in range(depths)]


@pytest.mark.parametrize("lengths", [[7, 7, 5, 1], [1, 1, 1], [40]], ids=str)
@pytest.mark.parametrize("depths", [1, 2, 5])
def test_merged_attention_and_all_its_gradients_equal_dense_attention(lengths: list[int], depths: int) -> None:
    query, keys, values = inputs(sum(lengths), depths)
    packing = Packing.of(lengths)
    merged, dense = (attention(query, keys, values, packing) for attention in (depth_attention, dense_depth_attention))
    torch.testing.assert_close(merged, dense, atol=2e-6, rtol=0)
    weights = torch.randn(merged.shape, generator=torch.Generator().manual_seed(9))
    for ours, reference in zip(
        torch.autograd.grad(merged, [query, *keys, *values], weights),
        torch.autograd.grad(dense, [query, *keys, *values], weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, atol=5e-6, rtol=1e-5)


def test_neighbours_of_equal_length_share_a_run() -> None:
    packing = Packing.of([3, 3, 2, 2, 3])
    assert packing.runs == ((0, 2, 3), (6, 2, 2), (10, 1, 3))
    assert packing.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_equals_transformers_with_the_targets_scaling(rope: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=128, rope_parameters=rope)
    query = torch.randn(1, 100, 2, 128, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(query, torch.arange(100)[None])
    reference, _ = apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)
    ours = rotate(query[0], *Rope(128, config).tables(torch.arange(100), torch.float32))
    torch.testing.assert_close(ours, reference[0], atol=1e-6, rtol=0)


def test_a_rope_that_changes_with_the_text_is_refused() -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=r"target\.path: the target's RoPE must be one of .* but is 'dynamic'"):
        Rope(64, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_that_of_transformers(dtype: torch.dtype) -> None:
    ours, reference = RmsNorm(32, 1e-5).to(dtype), LlamaRMSNorm(32, 1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(ours.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0))))
    x = torch.randn(10, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(ours(x), reference(x))
