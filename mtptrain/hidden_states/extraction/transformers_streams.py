"""Residual streams by transformers: whole documents packed into one row, without padding, each seeing itself alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface

from mtptrain.target.causal_attention import causal_attention
from mtptrain.target.model import Target

PACKED = "mtptrain_packed"
"""Name of the attention below among those of transformers."""


class TransformersStreams:
    """The target in this process."""

    def __init__(self, target: Target, layers: tuple[int, ...], batch_tokens: int, compile_layers: bool = False) -> None:
        """Take over a target.

        Args:
            target: the frozen target; its attention becomes the packed one.
            layers: k for the stream after k decoder layers; 0 gives the embeddings, the number of layers the state before the
                final norm.
            batch_tokens: of one forward, of whole documents.
            compile_layers: compile what lies around the attention of each decoder layer.
        """
        self.target, self.layers, self.batch_tokens = target, layers, batch_tokens
        target.model.set_attn_implementation(PACKED)
        if compile_layers:
            for layer in target.model.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """For each shard in order, its prompts' streams in any order: the index of the prompt in its shard, and [n, L, H].

        Batches lie within a shard, so that its bits are its own. The states are complete, on the target's device.
        """
        for prompts in shards:
            yield self._extract_shard(prompts)

    def _extract_shard(self, prompts: Sequence[NDArray[np.int32]]) -> Iterator[tuple[int, torch.Tensor]]:
        for batch in token_budget_batches([len(prompt) for prompt in prompts], self.batch_tokens):
            streams = residual_streams(self.target, [torch.from_numpy(prompts[i]) for i in batch], self.layers)
            if streams.is_cuda:
                torch.cuda.current_stream(streams.device).synchronize()  # whoever copies them does so on a stream of its own
            yield from zip(batch, streams.split([len(prompts[i]) for i in batch]), strict=True)


def token_budget_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of documents with at most `batch_tokens` tokens together, at least one document; the longest first.

    Documents of nearly equal length lie in one batch: attention serves neighbours of equal length with one call.
    """
    batch: list[int] = []
    room = batch_tokens
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        if batch and lengths[index] > room:
            yield batch
            batch, room = [], batch_tokens
        batch.append(index)
        room -= lengths[index]
    if batch:
        yield batch


def residual_streams(target: Target, documents: Sequence[torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor:
    """Residual streams of documents in one forward of a target with packed attention.

    Args:
        target: whose model has the attention `PACKED`.
        documents: token ids [n] each.
        layers: k for the stream after k decoder layers.

    Returns:
        [N, L, H] for the N tokens of all documents, in the target's dtype, on the device of its embeddings.
    """
    with target.capturing(layers) as streams:
        packed_forward(target, documents)
    return torch.stack([streams[k][0].to(target.device) for k in layers], dim=1)


@torch.inference_mode()
def packed_forward(target: Target, documents: Sequence[torch.Tensor]) -> None:
    """Run the decoder layers of a target with packed attention over documents, token ids [n] each."""
    packed = PackedDocuments.of([len(document) for document in documents], target.device)
    input_ids = torch.cat(list(documents)).long()[None].to(target.device)  # [1, N]
    target.model.model(input_ids=input_ids, position_ids=packed.positions[None], use_cache=False, packed_documents=packed)


@dataclass(frozen=True)
class PackedDocuments:
    """Where documents lie in N packed tokens, as attention on a device wants it."""

    runs: tuple[tuple[int, int, int], ...]
    """Neighbours of equal length: (first token, number of documents, tokens of each)."""
    positions: torch.Tensor  # i64[N], in the token's document
    offsets: torch.Tensor  # i32[documents + 1]
    longest: int

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> "PackedDocuments":
        runs, start = [], 0
        for length, run in groupby(lengths):
            runs.append((start, count := len(list(run)), length))
            start += count * length
        positions = torch.cat([torch.arange(length) for length in lengths])
        offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return PackedDocuments(tuple(runs), positions.to(device), offsets.to(device), max(lengths))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    packed_documents: PackedDocuments,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document, as transformers calls it.

    Args:
        module: of the layer; unused.
        query: [1, heads, N, head_dim].
        key: [1, kv heads, N, head_dim].
        value: [1, kv heads, N, value head_dim].
        attention_mask: None, for the documents say what is seen.
        scaling: of the scores.
        packed_documents: where the documents lie.
        sliding_window: tokens that are seen, the reading one included; None for all.
        kwargs: further ones of transformers, without meaning here.

    Returns:
        [1, N, heads, value head_dim], and no weights.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]:
        return _varlen(query, key, value, scaling, packed_documents, sliding_window), None
    outs = []
    for start, count, length in packed_documents.runs:
        queries, keys, values = (
            x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value)
        )
        out = causal_attention(queries, keys, values, scaling, sliding_window)  # [count, heads, length, head_dim]
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None], None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, documents: PackedDocuments, window: int | None
) -> torch.Tensor:
    """One flash kernel over all documents; the order of its sums does not depend on the batch."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, heads, head_dim]
    offsets = documents.offsets.to(query.device)
    out = varlen_attn(
        rows[0],
        rows[1],
        rows[2],
        offsets,
        offsets,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
        num_splits=1,
    )
    assert isinstance(out, torch.Tensor)
    return out[None]


AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)
