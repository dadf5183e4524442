"""Tests layers and attention against independent references."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.files import build_head
from mtptrain.heads.layers import RmsNorm, Rope, head_dims, rotate
from mtptrain.heads.packing import Packing
from mtptrain.settings.heads import EagleConfig, MtpConfig
from mtptrain.target.families import check_rope
from mtptrain.utils.errors import UserError
from tests.mtptrain.heads.dense import dense_depth_attention


def random_packing(generator: np.random.Generator) -> Packing:
    """Returns a packing of a few documents, whose spans are separated by at least one token."""
    lengths, spans = generator.integers(1, 41, generator.integers(1, 5)).tolist(), []
    for document, length in enumerate(lengths):
        edges = np.sort(generator.permutation(length + 1)[: generator.integers(7)]).tolist()
        spans += [(document, first, last - first) for first, last in zip(edges[::2], edges[1::2], strict=False)]
    return Packing.of_spans(lengths, spans or [(0, 0, 1)])


EQUAL_DOCUMENTS = Packing.of_spans([30] * 5, [(document, 2, 28) for document in range(5)])
"""Attention on a CPU computes segments of equal length together."""


def assert_attention_is_dense(packing: Packing, depths: int, kv_heads: int, seed: int, atol: float) -> None:
    """Compares attention of random queries of four heads, and all its gradients, with that over one dense mask."""
    generator = torch.Generator().manual_seed(seed)
    num_drafts, num_tokens = len(packing.draft_positions), len(packing.positions)
    shapes = [(num_drafts, 4), *[(num_tokens, kv_heads)] * 2, *[(num_drafts, kv_heads)] * (2 * depths)]
    inputs = [torch.randn(*shape, 64, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(inputs[0].shape, generator=generator)
    query, key, value, *own = inputs
    merged = depth_attention(query, key, value, own[:depths], own[depths:], packing)
    dense = dense_depth_attention(query, key, value, own[:depths], own[depths:], packing)
    torch.testing.assert_close(merged, dense, atol=atol, rtol=0)
    grads = [torch.autograd.grad(attended, inputs, weights) for attended in (merged, dense)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_merged_attention_and_all_its_gradients_equal_dense_attention() -> None:
    assert_attention_is_dense(EQUAL_DOCUMENTS, depths=1, kv_heads=2, seed=0, atol=5e-6)
    for seed in range(100):
        generator = np.random.default_rng(seed)
        depths, kv_heads = int(generator.integers(5)), int(generator.choice([1, 2, 4]))
        assert_attention_is_dense(random_packing(generator), depths, kv_heads, seed, 5e-6)


def bf16_errors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """Returns the relative errors of the output in bf16, and of the gradients of queries, keys and values."""
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (query, key, value)]
        attended = depth_attention(*leaves, [], [], packing)
        found.append([attended, *torch.autograd.grad(attended, leaves, weights.to(dtype))])
    return [(ours - exact).norm() / exact.norm() for ours, exact in zip(*found, strict=True)]


def test_attention_in_bf16_is_as_exact_as_its_dtype_whatever_the_size_of_scores() -> None:
    """Sums in bf16 over the sixty answers of a document would be off by more than a hundredth."""
    sixty = [(0, 10 * i + 5, 5) for i in range(60)]
    for packing in (Packing.of_spans([300, 200], [(0, 250, 50), (1, 30, 100)]), Packing.of_spans([600], sixty)):
        for size in (0.1, 1.0, 3.0):  # of scores that are nearly equal, up to 40, where one key of a row dominates
            generator = torch.Generator().manual_seed(0)
            query = torch.randn(len(packing.draft_positions), 4, 64, generator=generator) * size
            key, value = (torch.randn(len(packing.positions), 2, 64, generator=generator) for _ in range(2))
            of_output, *of_gradients = bf16_errors(query, key * size, value, packing)
            assert of_output < 5e-3 and max(of_gradients) < 8e-3, size


TURNS: dict[str, object] = {"rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, object]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", **TURNS},
    {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    {"rope_type": "yarn", **TURNS, "original_max_position_embeddings": 32},
]


def test_rope_equals_transformers_with_the_targets_scaling_and_an_unknown_one_is_refused() -> None:
    for rope in ROPES:
        sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": 128}
        config = LlamaConfig(**sizes, rope_parameters=rope)
        query = torch.randn(1, 100, 2, 128, generator=torch.Generator().manual_seed(0))
        cos, sin = LlamaRotaryEmbedding(config)(query, torch.arange(100)[None])
        reference, _ = apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)
        ours = rotate(query[0], *Rope(128, rope, 128).tables(torch.arange(100), torch.float32))
        torch.testing.assert_close(ours, reference[0], atol=1e-6, rtol=0)
        own = EagleHead(EagleConfig(rope_parameters=rope), LlamaConfig(**sizes)).self_attn.rope
        assert torch.equal(own.inv_freq, Rope(128, rope, 128).inv_freq)
    partial = {**ROPES[0], "partial_rotary_factor": 0.5}
    for wrong in (
        {"rope_type": "dynamic", **TURNS},
        {"rope_type": "linear", "rope_theta": 1e4},
        {"rope_theta": 1e4},
        partial,
    ):
        with pytest.raises(UserError, match=r"head\.rope_parameters: must be a RoPE .*; correct it"):
            Rope(128, wrong, 128)
    with pytest.raises(ValueError, match=r"target\.path: the target's RoPE must be one of .* but is 'dynamic', which"):
        check_rope(LlamaConfig(rope_parameters={"rope_type": "dynamic", **TURNS}))


def test_rms_norm_equals_that_of_transformers() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, reference = RmsNorm(32, 1e-5).to(dtype), LlamaRMSNorm(32, 1e-5).to(dtype)
        with torch.no_grad():
            reference.weight.copy_(ours.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0))))
        x = torch.randn(10, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(ours(x), reference(x))


def test_the_heads_head_dim_is_one_that_engines_have_kernels_for() -> None:
    """In Qwen3-4B and Qwen3-32B, hidden size / attention heads is 80, for which engines lack kernels."""
    target_config = LlamaConfig(hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    for config, message in (
        (MtpConfig(num_attention_heads=2), r"attention_heads: the head dim must be one of \(64, 128\), .* is 32"),
        (MtpConfig(num_key_value_heads=2), r"value_heads: must divide the 1 attention heads, but is 2"),
        (EagleConfig(head_dim=80), r"head_dim: the head dim must be .* but is 80 .*; set head\.head_dim=64"),
    ):
        with pytest.raises(ValueError, match=message):
            build_head(config, target_config)
    for size, heads, expected in ((2560, 32, 20), (4096, 32, 32)):
        target_config.hidden_size, target_config.num_attention_heads = size, heads
        assert head_dims(MtpConfig(), target_config).num_attention_heads == expected
    target_config.hidden_size = 96
    with pytest.raises(UserError, match=r"but is 96 with 1 heads .*; set head=eagle3 head\.head_dim=64$"):
        head_dims(MtpConfig(), target_config)
