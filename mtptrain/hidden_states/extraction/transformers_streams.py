"""Extracts residual streams with transformers from whole documents, packed without padding.

A target whose layers keep states reads documents padded on the right: packed documents would read each other's states.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from mtptrain.target.causal_attention import (
    CAUSAL_OR_MASKED,
    FLASH_DTYPES,
    FULL,
    Extras,
    MaskOf,
    SeenSlots,
    causal_attention,
    refuse_keywords,
    tempered,
)
from mtptrain.target.loading import check_texts, refuse_difference, running, short_limits
from mtptrain.target.model import Target

PACKED = "mtptrain_packed"
"""The name under which `packed_attention` is registered with transformers."""


class TransformersStreams:
    """Extracts residual streams with a target in this process."""

    def __init__(
        self, target: Target, layers: tuple[int, ...], batch_tokens: int, compile_layers: bool = False
    ) -> None:
        """Replace the attention of the target, in place, with packed attention, and compile its layers if that is set.

        Layer k is the stream after k decoder layers: 0 is the embeddings, and the last is the state before the final
        norm. A forward has at most `batch_tokens` tokens, unless a single document is longer.
        """
        self.target, self.layers, self.batch_tokens = target, layers, batch_tokens
        target.model.set_attn_implementation(PACKED)
        if compile_layers:
            for layer in target.layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """Yields what `Streams` says. No batch spans two shards, so a shard's bits do not depend on the others."""
        for prompts in shards:
            yield self._extract_shard(prompts)

    def _extract_shard(self, prompts: Sequence[NDArray[np.int32]]) -> Iterator[tuple[int, torch.Tensor]]:
        lengths = [len(prompt) for prompt in prompts]
        for batch in token_budget_batches(lengths, self.batch_tokens, self.target.form.keeps_states):
            streams = residual_streams(self.target, [torch.from_numpy(prompts[i]) for i in batch], self.layers)
            if streams.is_cuda:
                # Other threads copy the states on their own CUDA streams.
                torch.cuda.current_stream(streams.device).synchronize()
            yield from zip(batch, streams.split([len(prompts[i]) for i in batch]), strict=True)


def token_budget_batches(lengths: Sequence[int], batch_tokens: int, is_padded: bool = False) -> Iterator[list[int]]:
    """Yields batches of document indices, longest documents first, of at most `batch_tokens` tokens with any padding.

    A longer document is a batch. Documents of equal length are neighbours: attention handles them in one call.
    """
    batch: list[int] = []
    room = batch_tokens
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        if batch and lengths[batch[0] if is_padded else index] > room:
            yield batch
            batch, room = [], batch_tokens
        batch.append(index)
        room -= lengths[batch[0] if is_padded else index]
    if batch:
        yield batch


def residual_streams(target: Target, documents: Sequence[torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor:
    """Returns the residual streams [N, L, H] of all N tokens of documents, from one forward with attention `PACKED`."""
    with target.capturing(layers) as streams:
        forward_documents(target, documents)
    if not target.form.keeps_states:
        return torch.stack([streams[k][0].to(target.device) for k in layers], dim=1)
    longest = max(len(document) for document in documents)
    rows = [torch.arange(len(document)) + index * longest for index, document in enumerate(documents)]
    tokens = torch.cat(rows).to(target.device)  # which of all tokens are no padding
    return torch.stack([streams[k].flatten(0, 1).to(target.device)[tokens] for k in layers], dim=1)


@torch.no_grad()
def check_streams(target: Target) -> None:
    """Refuse a target whose streams of several documents are not those of its own forward over each document."""
    text, other = check_texts(target)
    layers = tuple(range(len(target.layers) + 1))
    documents = [text[:-3], text, other]
    with short_limits(target), running(target, "the forward of several documents"):
        with target.attention(PACKED):
            ours = residual_streams(target, documents, layers).split([len(document) for document in documents])
        for document, streams in zip(documents, ours, strict=True):
            with target.attention("eager"), target.capturing(layers) as own:
                target.model(input_ids=document[None], use_cache=False)
            for layer in layers:
                expected = own[layer][0].to(target.device)
                refuse_difference(target, f"states of documents after {layer} layers", streams[:, layer], expected)


@torch.inference_mode()
def forward_documents(target: Target, documents: Sequence[torch.Tensor]) -> None:
    """Run a target over documents, packed or, if it keeps states, padded; each is a tensor of token ids [n]."""
    if target.form.keeps_states:
        input_ids = pad_sequence(list(documents), batch_first=True).long().to(target.device)  # [B, S]
        positions = torch.arange(input_ids.shape[1], device=target.device).expand(len(documents), -1)
        with target.attention(CAUSAL_OR_MASKED):
            seen = SeenSlots(target.form.masks, None, positions)
            target.decoder(input_ids=input_ids, position_ids=positions, use_cache=False, seen_slots=seen)
        return
    packed = PackedDocuments.of([len(document) for document in documents], target.device, target.form.masks)
    input_ids = torch.cat(list(documents)).long()[None].to(target.device)  # [1, N]
    target.decoder(input_ids=input_ids, position_ids=packed.positions[None], use_cache=False, packed_documents=packed)


@dataclass(frozen=True)
class PackedDocuments:
    """The boundaries of the documents in N packed tokens."""

    runs: tuple[tuple[int, int, int], ...]
    """Consecutive documents of equal length: (first token, number of documents, number of tokens in each)."""
    positions: torch.Tensor
    """Position of each token in its document, i64[N]."""
    offsets: torch.Tensor
    """First token of each document, and N at the end, i32[documents + 1]."""
    longest: int
    """Number of tokens in the longest document."""
    layer_masks: tuple[MaskOf | None, ...] = ()
    """`TargetForm.masks`, one for each layer; `FULL` in every layer where this is empty."""

    def mask_of(self, module: torch.nn.Module) -> MaskOf:
        """Returns which tokens of its document a token sees in a layer's attention."""
        return (self.layer_masks[int(module.layer_idx)] if self.layer_masks else None) or FULL  # type: ignore[arg-type]

    @staticmethod
    def of(lengths: list[int], device: torch.device, layer_masks: tuple[MaskOf | None, ...] = ()) -> "PackedDocuments":
        runs, start = [], 0
        for length, run in groupby(lengths):
            runs.append((start, count := len(list(run)), length))
            start += count * length
        positions = torch.cat([torch.arange(length) for length in lengths])
        offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return PackedDocuments(tuple(runs), positions.to(device), offsets.to(device), max(lengths), layer_masks)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    packed_documents: PackedDocuments,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Returns causal attention inside each document [1, N, heads, value head_dim], as transformers expects it.

    Queries, keys and values are [1, heads, N, head_dim]. `packed_documents` replaces the mask, which must be None;
    `s_aux` are the sinks of the attention heads.
    """
    refuse_keywords(module, {**kwargs, "attention_mask": attention_mask})
    mask, extras = packed_documents.mask_of(module), Extras(softcap, s_aux)
    query = tempered(module, query, packed_documents.positions[None], num_read=0)
    has_kernel = mask.chunk is None and not extras and query.shape[-1] == value.shape[-1]
    if has_kernel and query.is_cuda and query.dtype in FLASH_DTYPES:
        return _varlen(query, key, value, scaling, packed_documents, mask.window), None
    outs = []
    for start, count, length in packed_documents.runs:
        queries, keys, values = (
            x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        out = causal_attention(queries, keys, values, scaling, mask, extras)  # [count, heads, length, head_dim]
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None], None


@cache
def _parameters_of(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    documents: PackedDocuments,
    window: int | None,
) -> torch.Tensor:
    """Computes attention in one flash kernel.

    `num_splits=1` keeps the order of summation within a document independent of the other documents. torch 2.11
    has neither this argument nor `enable_gqa`: there, the kernel shares key heads without being told.
    """
    from torch.nn.attention.varlen import varlen_attn

    settings: dict[str, Any] = {"enable_gqa": key.shape[1] != query.shape[1], "num_splits": 1}
    known = _parameters_of(varlen_attn)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, head_dim]
    offsets, longest = documents.offsets.to(query.device), documents.longest
    given = {name: value for name, value in settings.items() if name in known}
    window_size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=window_size, **given)
    assert isinstance(out, torch.Tensor)
    return out[None]


AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)
