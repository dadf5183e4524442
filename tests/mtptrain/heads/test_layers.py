"""Tests layers and attention against independent references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtptrain.heads.attention import cpu_blocks
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.layers import RmsNorm, Rope, rotate
from mtptrain.heads.packing import Packing
from mtptrain.target.families import check_rope
from mtptrain.utils import compile as fusing
from tests.mtptrain.heads.dense import dense_depth_attention

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


def spans_of(draw: st.DrawFn, document: int, length: int) -> list[tuple[int, int, int]]:
    """Draw spans of one document that are separated by at least one token."""
    edges = draw(st.lists(st.integers(0, length), unique=True, max_size=6).map(sorted))
    return [(document, first, last - first) for first, last in zip(edges[::2], edges[1::2], strict=False)]


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    spans = [span for document, length in enumerate(lengths) for span in spans_of(draw, document, length)]
    return Packing.of_spans(lengths, spans or [(0, 0, 1)])


def random_inputs(
    packing: Packing, kv_heads: int, depths: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns random queries of four heads, keys, values, and the keys and values of later depths."""
    num_drafts, num_tokens = len(packing.draft_positions), len(packing.positions)

    def leaf(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, 64, generator=generator).requires_grad_()

    own_keys, own_values = ([leaf(num_drafts, kv_heads) for _ in range(depths)] for _ in range(2))
    return leaf(num_drafts, 4), leaf(num_tokens, kv_heads), leaf(num_tokens, kv_heads), own_keys, own_values


def in_bf16_and_fp32(inputs: list[torch.Tensor], weights: torch.Tensor, packing: Packing) -> list[list[torch.Tensor]]:
    """Return the output, and the gradients of queries, keys and values, in both dtypes from the same bf16 inputs."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        attended = depth_attention(query, key, value, [], [], packing)
        found.append([attended, *torch.autograd.grad(attended, leaves, weights.to(dtype))])
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    packing=packings(),
    depths=st.integers(0, 4),
    kv_heads=st.sampled_from([1, 2, 4]),
    short_tokens=st.sampled_from([0, 20, 1024]),
    block_rows=st.sampled_from([1, 7, 128]),
    block_keys=st.sampled_from([1, 5, 512]),
    seed=st.integers(0, 99),
)
def test_merged_attention_and_all_its_gradients_equal_dense_attention(
    packing: Packing, depths: int, kv_heads: int, short_tokens: int, block_rows: int, block_keys: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value, own_keys, own_values = random_inputs(packing, kv_heads, depths, generator)
    inputs = [query, key, value, *own_keys, *own_values]
    weights = torch.randn(query.shape, generator=generator)
    dense = dense_depth_attention(query, key, value, own_keys, own_values, packing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_blocks, "SHORT_TOKENS", short_tokens)
        patch.setattr(cpu_blocks, "BLOCK_ROWS", block_rows)
        patch.setattr(cpu_blocks, "BLOCK_KEYS", block_keys)
        patch.setattr(cpu_blocks, "BACKWARD_ROWS", 4 * block_rows)
        patch.setattr(cpu_blocks, "MIN_BLOCK_ROWS", 4 * block_rows)
        patch.setattr(cpu_blocks, "BLOCK_SCORES", 100)
        merged = depth_attention(query, key, value, own_keys, own_values, packing)
        grads = torch.autograd.grad(merged, inputs, weights)
    torch.testing.assert_close(merged, dense, atol=5e-6, rtol=0)
    for ours, reference in zip(grads, torch.autograd.grad(dense, inputs, weights), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("size", "head_dim"), [(0.1, 64), (1.0, 64), (3.0, 64), (0.1, 128), (1.0, 128)])
@pytest.mark.parametrize(
    ("lengths", "spans"),
    [
        ([300, 200], [(0, 0, 300), (1, 0, 200)]),
        ([300, 200], [(0, 250, 50), (1, 30, 100)]),
        ([2600], [(0, 2550, 50)]),
        ([4000], [(0, 3950, 50)]),
    ],
    ids=["all tokens", "answers after prompts", "an answer after a long prompt", "an answer after a longer prompt"],
)
@pytest.mark.parametrize("has_tiles", [False, True])
def test_attention_in_bf16_is_as_exact_as_its_dtype_whatever_the_size_of_scores(
    has_tiles: bool,
    lengths: list[int],
    spans: list[tuple[int, int, int]],
    size: float,
    head_dim: int,
    is_fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores range from 40, where one key of a row dominates, to values so small that thousands of keys have equal
    weight. The output would be off by 0.01 if scores were computed only once, and gradients by 0.015 if the lse were
    subtracted instead of the largest score."""
    monkeypatch.setattr(fusing, "_is_on", is_fused)
    monkeypatch.setattr(cpu_blocks, "HAS_TILES", has_tiles)
    generator, packing, num_tokens = torch.Generator().manual_seed(0), Packing.of_spans(lengths, spans), sum(lengths)

    def make(length: int, heads: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(length, heads, head_dim, generator=generator) * scale).bfloat16()

    num_drafts = len(packing.draft_positions)
    inputs, weights = [make(num_drafts, 4, size), make(num_tokens, 2, size), make(num_tokens, 2)], make(num_drafts, 4)
    found = in_bf16_and_fp32(inputs, weights, packing)
    attended_off, *grads_off = [(ours - exact).norm() / exact.norm() for ours, exact in zip(*found, strict=True)]
    assert attended_off < 5e-3
    assert max(grads_off) < 1e-2


@pytest.mark.parametrize("has_tiles", [False, True])
def test_a_key_that_every_row_reads_almost_alone_gets_its_whole_gradient_in_bf16(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets attend to the first token of a document in this way.

    With tiles, the key's probability of one would be off by 0.005 if the gap between the lse and the subtracted value
    were not rounded to bf16.
    """
    monkeypatch.setattr(cpu_blocks, "HAS_TILES", has_tiles)
    generator, packing = torch.Generator().manual_seed(0), Packing.of_spans([300])
    query, key = torch.full((300, 4, 64), 2.0), torch.randn(300, 2, 64, generator=generator) / 10
    key[0] = 2.0  # the scaled score is 32, and those of other keys are near 0
    value, weights = torch.randn(300, 2, 64, generator=generator), torch.randn(300, 4, 64, generator=generator)
    found = in_bf16_and_fp32([x.bfloat16() for x in (query, key, value)], weights.bfloat16(), packing)
    of_value, exact = (grads[-1] for grads in found)
    assert (of_value - exact).norm() / exact.norm() < 3e-3


@pytest.mark.parametrize("is_fused", [False, True])
def test_attention_of_documents_of_several_blocks_equals_dense_attention(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs a document of several blocks, one of a block and a token, and three equal ones in several batches."""
    monkeypatch.setattr(fusing, "_is_on", is_fused)
    monkeypatch.setattr(cpu_blocks, "BATCH_TOKENS", 300)
    generator = torch.Generator().manual_seed(0)
    packing = Packing.of_spans(
        [300, 129, 130, 130, 130, 5], [(i, 0, n) for i, n in enumerate([300, 129])] + [(i, 2, 128) for i in (2, 3, 4)]
    )
    query, key, value, own_keys, own_values = random_inputs(packing, 2, 1, generator)
    weights = torch.randn(query.shape, generator=generator)
    found = []
    for attention in (depth_attention, dense_depth_attention):
        attended = attention(query, key, value, own_keys, own_values, packing)
        grads = torch.autograd.grad(attended, [query, key, value, *own_keys, *own_values], weights)
        found.append([attended, *grads])
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_tiles", [False, True])
def test_documents_of_all_lengths_are_computed_by_few_compiled_functions(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After eight recompilations, torch runs a function eagerly and only logs that.

    Given a view, torch would also recompile for each shape of the viewed tensor, and exceed this limit here.
    """
    monkeypatch.setattr(fusing, "_is_on", True)
    monkeypatch.setattr(cpu_blocks, "HAS_TILES", has_tiles)
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for lengths in ([510, 510], [512], [129, 64, 37], [256, 256, 256], [300, 1000], [128, 128], [513]):
            for divisor in (None, 2):  # draft in all of each document, or in its second half
                firsts = [length // divisor if divisor else 0 for length in lengths]
                packing = Packing.of_spans(lengths, [(i, first, lengths[i] - first) for i, first in enumerate(firsts)])
                for heads, kv_heads in ((4, 1), (8, 2)):
                    query, key, value = (
                        torch.randn(length, of_each, 64, generator=generator).bfloat16().requires_grad_()
                        for length, of_each in (
                            (len(packing.draft_positions), heads),
                            (sum(lengths), kv_heads),
                            (sum(lengths), kv_heads),
                        )
                    )
                    depth_attention(query, key, value, [], [], packing).sum().backward()


def test_gradients_of_keys_that_many_answers_read_are_summed_in_fp32() -> None:
    """One document has sixty answers, so sums in bf16 would be off by more than a hundredth."""
    generator, packing = (
        torch.Generator().manual_seed(0),
        Packing.of_spans([600], [(0, 10 * i + 5, 5) for i in range(60)]),
    )

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs, weights = [make(300, 4, 64), make(600, 2, 64), make(600, 2, 64)], make(300, 4, 64)
    found = in_bf16_and_fp32(inputs, weights, packing)
    for ours, exact in list(zip(*found, strict=True))[2:]:
        first = slice(0, 100)  # keys that at least fifty answers read
        assert (ours[first] - exact[first]).norm() / exact[first].norm() < 6e-3


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_equals_transformers_with_the_targets_scaling(rope: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=128, rope_parameters=rope
    )
    query = torch.randn(1, 100, 2, 128, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(query, torch.arange(100)[None])
    reference, _ = apply_rotary_pos_emb(query, query, cos, sin, unsqueeze_dim=2)
    ours = rotate(query[0], *Rope(128, config).tables(torch.arange(100), torch.float32))
    torch.testing.assert_close(ours, reference[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "lama3"])
def test_a_rope_that_is_unknown_or_changes_with_the_text_is_refused(kind: str) -> None:
    config = LlamaConfig(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    message = rf"target\.path: the target's RoPE must be one of .* but is '{kind}', which is unknown, or changes with"
    with pytest.raises(ValueError, match=message):
        check_rope(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_that_of_transformers(dtype: torch.dtype) -> None:
    ours, reference = RmsNorm(32, 1e-5).to(dtype), LlamaRMSNorm(32, 1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(ours.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0))))
    x = torch.randn(10, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(ours(x), reference(x))
