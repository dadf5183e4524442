"""Packed documents: which tokens are draft positions, and which keys they see."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

Indices = slice | torch.Tensor
"""Indices of rows or keys: a slice if they are consecutive, which avoids a copy, else i64."""


@dataclass(frozen=True)
class Segments:
    """Input of one attention kernel: the queries of segment i see the keys of segment i."""

    queries: Indices  # Q of the M draft positions
    keys: Indices  # S of the N keys, draft positions first, then prompt tokens
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each segment
    query_offsets: torch.Tensor  # i32[segments + 1]
    key_offsets: torch.Tensor  # i32[segments + 1]
    is_causal: bool
    """Whether query i of a segment sees only its keys 0 .. i, rather than all of them."""

    @staticmethod
    def of(spans: Sequence[tuple[range, range]], key_indices: NDArray[np.int64], is_causal: bool) -> "Segments":
        """Build segments from their draft positions and tokens, and the index of each token among the keys i64[N]."""
        lengths = tuple((len(rows), len(tokens)) for rows, tokens in spans)
        return Segments(
            queries=_as_indices(_concatenated([rows for rows, _ in spans])),
            keys=_as_indices(key_indices[_concatenated([tokens for _, tokens in spans])]),
            lengths=lengths,
            query_offsets=torch.tensor([0, *accumulate(queries for queries, _ in lengths)], dtype=torch.int32),
            key_offsets=torch.tensor([0, *accumulate(keys for _, keys in lengths)], dtype=torch.int32),
            is_causal=is_causal,
        )


@dataclass(frozen=True)
class Packing:
    """N packed tokens, of which M are draft positions: consecutive tokens of each span, spans in order."""

    positions: torch.Tensor  # i64[N], position of each token in its document
    rows: torch.Tensor  # i64[M], tokens that are draft positions
    prompts: (
        torch.Tensor
    )  # i64[N - M], all other tokens, which only provide keys and values; those that nothing sees come last
    key_indices: (
        torch.Tensor
    )  # i64[N], index of each token in the order of the keys: draft positions, then prompt tokens
    segments: tuple[Segments, ...]
    """First the causal segments inside each span; then, for spans that do not start their document, segments over all
    tokens of the document before the span. Each of the latter `Segments` has one span per document, so that no kernel
    reads more than N keys."""

    @property
    def num_pairs(self) -> float:
        """Number of pairs of a draft position and a token that it sees."""
        return sum((q * (k + 1) / 2 if part.is_causal else q * k) for part in self.segments for q, k in part.lengths)

    @staticmethod
    def of(lengths: Sequence[int], spans: Sequence[tuple[int, int, int]] | None = None) -> "Packing":
        """Pack documents.

        Args:
            lengths: tokens of each document.
            spans: (document, first token in it, number of tokens) of the draft positions, in order; by default all.
        """
        spans = [(i, 0, length) for i, length in enumerate(lengths)] if spans is None else spans
        starts = [0, *accumulate(lengths)]
        first_rows = [0, *accumulate(count for *_, count in spans)]
        # 1. For each span, its draft positions with its own tokens, and with the tokens of its document before it.
        inside, before = [], defaultdict[int, list[tuple[range, range]]](list)
        num_before = Counter[int]()  # spans of each document that have tokens before them
        is_row, is_seen = np.zeros((2, starts[-1]), dtype=bool)
        for row, (document, first, count) in zip(first_rows, spans, strict=False):
            rows, token = range(row, row + count), starts[document] + first
            inside.append((rows, range(token, token + count)))
            is_row[token : token + count] = True
            if first:
                before[num_before[document]].append((rows, range(starts[document], token)))
                num_before[document] += 1
                is_seen[starts[document] : token] = True
        # 2. The order of keys: draft positions, prompt tokens that some span sees, prompt tokens that none sees.
        row_tokens, *prompt_tokens = (np.flatnonzero(part) for part in (is_row, is_seen & ~is_row, ~is_seen & ~is_row))
        key_indices = np.concatenate([row_tokens, *prompt_tokens]).argsort()
        return Packing(
            positions=torch.from_numpy(_concatenated([range(length) for length in lengths])),
            rows=torch.from_numpy(row_tokens),
            prompts=torch.from_numpy(np.concatenate(prompt_tokens)),
            key_indices=torch.from_numpy(key_indices),
            segments=(
                Segments.of(inside, key_indices, is_causal=True),
                *(Segments.of(part, key_indices, is_causal=False) for part in before.values()),
            ),
        )

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split values per token [N, ...] into those of draft positions [M, ...] and prompt tokens [N - M, ...]."""
        if not len(self.prompts):
            return x, x[:0]
        order = torch.cat([self.rows, self.prompts])
        reordered: torch.Tensor = _Reorder.apply(x, order, self.key_indices)  # type: ignore[no-untyped-call]
        rows, prompts = reordered.split([len(self.rows), len(self.prompts)])
        return rows, prompts


def _concatenated(ranges: Sequence[range]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(part.start, part.stop) for part in ranges)])


def _as_indices(indices: NDArray[np.int64]) -> Indices:
    if (np.diff(indices) != 1).any():
        return torch.from_numpy(indices)
    first = int(indices[0]) if len(indices) else 0
    return slice(first, first + len(indices))


class _Reorder(torch.autograd.Function):
    """x[order] for a permutation. Its gradient is gathered, while that of plain indexing is added up row by row."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad[inverse], None, None
