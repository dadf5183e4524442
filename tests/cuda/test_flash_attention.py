"""The CUDA branch of attention over depths, run on a CPU with FlashAttention's operators replaced by plain formulas in
their layouts."""

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from mtptrain.heads.attention import training as attention
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.extraction.transformers_streams import PackedDocuments, _varlen
from tests.mtptrain.heads import dense, test_dflash, test_layers

MAX_SEGMENTS = 3
"""A small one, so that most kernels here are called more than once."""


def segments(cum_q: torch.Tensor, cum_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for i in range(len(cum_q) - 1):
        yield slice(int(cum_q[i]), int(cum_q[i + 1])), slice(int(cum_k[i]), int(cum_k[i + 1]))


def scores_of(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Returns scores [heads, Q, S]. If causal, the last query sees every key, and each query before it one key less."""
    scores = torch.einsum("qhd,khd->hqk", query, of_each_head(key, query.shape[1])) * query.shape[-1] ** -0.5
    if is_causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def of_each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def check_layout(query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int) -> None:
    assert cum_q.dtype == cum_k.dtype == torch.int32 and cum_q.is_contiguous() and cum_k.is_contiguous()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert (int(cum_q[-1]), int(cum_k[-1])) == (len(query), len(key)) and len(key) == len(value)
    assert len(cum_q) - 1 <= MAX_SEGMENTS, "the segments are a dimension of the kernel's grid"
    assert (max_q, max_k) == (int(cum_q.diff().max()), int(cum_k.diff().max()))


def reference_forward(
    query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_forward` over packed segments: out [Q, heads, head_dim] and the natural log-sum-exp
    f32[heads, Q]."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k)
    assert dropout == 0.0 and debug is False
    heads = query.shape[1]
    out, lse = torch.empty_like(query), torch.empty(heads, len(query))
    for queries, tokens in segments(cum_q, cum_k):
        scores = scores_of(query[queries], key[tokens], causal)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), of_each_head(value[tokens], heads))
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, state[:0], torch.empty(0)


def reference_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
    dropout: float, causal: bool, state: Any, unused: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_backward`: P = exp(QK - lse), dS = P * (dO V - rowsum(dO * O)), as FlashAttention
    computes them."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k)
    assert dropout == 0.0 and grad.is_contiguous() and lse.is_contiguous() and state.dtype == torch.uint64
    heads, kv_heads = query.shape[1], key.shape[1]
    assert lse.shape == (heads, len(query)) and lse.dtype == torch.float32
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, tokens in segments(cum_q, cum_k):
        probs = (scores_of(query[queries], key[tokens], causal) - lse[:, queries, None]).exp()
        delta = (grad[queries] * out[queries]).sum(-1).T[..., None]
        of_probs = torch.einsum("qhd,khd->hqk", grad[queries], of_each_head(value[tokens], heads))
        of_scores = probs * (of_probs - delta) * query.shape[-1] ** -0.5
        grads[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, of_each_head(key[tokens], heads))
        grads[1][tokens] += torch.einsum("hqk,qhd->khd", of_scores, query[queries]).unflatten(1, (kv_heads, -1)).sum(2)
        grads[2][tokens] += torch.einsum("hqk,qhd->khd", probs, grad[queries]).unflatten(1, (kv_heads, -1)).sum(2)
    return grads


class ReferenceOps:
    """Replaces torch.ops.aten. The CUDA branch calls only these two of its operators."""

    _flash_attention_forward = staticmethod(reference_forward)
    _flash_attention_backward = staticmethod(reference_backward)


ANSWERS = Packing.of_spans([40, 33, 20], [(0, 10, 9), (0, 25, 15), (1, 3, 30), (2, 0, 20)])
THREE_TURNS = Packing.of_spans([60], [(0, 5, 10), (0, 20, 10), (0, 40, 20)])
POINTS = Packing.of_points([40, 12], [np.array([2, 3, 9, 20, 21, 38]), np.array([0, 11])])


def test_the_cuda_branch_equals_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SEGMENTS", MAX_SEGMENTS)
    monkeypatch.setattr(attention, "aten", ReferenceOps)
    monkeypatch.setattr(attention, "uses_gpu_kernels", lambda _: True)
    for packing in (Packing.of_spans([7, 5, 4]), ANSWERS, THREE_TURNS, POINTS):
        for depths in (0, 2):
            test_layers.assert_attention_is_dense(packing, depths, kv_heads=2, seed=1, atol=1e-5)
    for case in dense.PACKINGS:
        for window in (None, 6):
            test_dflash.assert_blocks_are_dense(case, window)


def test_extraction_gives_an_older_torch_only_the_arguments_that_it_knows() -> None:
    """torch 2.11 has neither `enable_gqa` nor `num_splits`."""
    given: list[dict[str, object]] = []

    def older(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
        max_q: int, max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        given.append({"scale": scale, "window_size": window_size})
        return query

    documents = PackedDocuments.of([3, 2], torch.device("cpu"))
    query, key = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    with patch("torch.nn.attention.varlen.varlen_attn", older):
        _varlen(query, key, key, 0.5, documents, 4)
    assert given == [{"scale": 0.5, "window_size": (3, 0)}]
