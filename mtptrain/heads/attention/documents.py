"""Computes a small language model's attention: in training over packed documents, in decoding over a cache.

Packed documents do not see each other.
"""

import math
from dataclasses import replace

import torch
from transformers import AttentionInterface

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.packing import Packing, Segments
from mtptrain.target.causal_attention import causal_or_masked_attention, refuse_keywords

DOCUMENTS_OR_CACHE = "mtptrain_documents_or_cache"
"""The name under which `documents_or_cache_attention` is registered with transformers."""


def longer_documents(packing: Packing) -> Packing:
    """Returns a packing in which every document has one more token, and attention is causal over whole documents.

    A draft model reads the first token of a document and the token after each of its tokens: one token more
    than the document has in the packing. Only its `segments`, `document_lengths` and `document_offsets` are those of
    the longer documents; all other fields are still those of `packing`.
    """
    lengths = tuple(length + 1 for length in packing.document_lengths)
    offsets = packing.document_offsets + torch.arange(len(lengths) + 1, device=packing.document_offsets.device)
    everything, offsets_i32 = slice(0, sum(lengths)), offsets.int()
    segments = Segments(
        queries=everything,
        keys=everything,
        lengths=tuple((length, length) for length in lengths),
        query_offsets=offsets_i32,
        key_offsets=offsets_i32,
        is_causal=True,
    )
    return replace(packing, segments=(segments,), document_lengths=lengths, document_offsets=offsets)


def documents_or_cache_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    documents: Packing | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attends within packed documents in training, and over a `PositionCache` in decoding.

    Args:
        module: the layer's attention.
        query: [B, heads, S, head_dim]; B = 1 with `documents`.
        key: [B, kv heads, slots, head_dim].
        value: [B, kv heads, slots, value head_dim].
        attention_mask: must be None.
        documents: the packed documents in training; None in decoding.
        scaling: scale of the scores; with `documents` it must be 1 / sqrt(head_dim).
        kwargs: those of `causal_or_masked_attention` in decoding; others must be among `UNUSED_KEYWORDS`.

    Returns:
        The attention output [B, S, heads, value head_dim], and None in place of attention weights.
    """
    if documents is None:
        return causal_or_masked_attention(module, query, key, value, attention_mask, scaling, **kwargs)  # type: ignore[arg-type]
    refuse_keywords(module, {**kwargs, "attention_mask": attention_mask})
    assert scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, (kv) heads, head_dim]
    return depth_attention(query, key, value, [], [], documents)[None], None


AttentionInterface.register(DOCUMENTS_OR_CACHE, documents_or_cache_attention)
