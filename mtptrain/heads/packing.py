"""Where documents of a batch lie, and which of their tokens draft."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

Places = slice | torch.Tensor
"""Of some rows or tokens: i64 unless they lie behind each other, for then they are read without a copy."""


@dataclass(frozen=True)
class Segments:
    """Queries and keys of one attention kernel: the queries of segment i see the keys of segment i."""

    queries: Places  # Q of the M rows
    keys: Places  # S of the N tokens, rows first and prompts behind them
    lengths: tuple[tuple[int, int], ...]  # of each segment: queries, keys
    query_offsets: torch.Tensor  # i32[segments + 1]
    key_offsets: torch.Tensor  # i32[segments + 1]
    is_causal: bool
    """Query i of a segment sees its keys 0 .. i; all of them otherwise."""

    @staticmethod
    def of(spans: Sequence[tuple[range, range]], places: NDArray[np.int64], is_causal: bool) -> "Segments":
        """From rows and tokens of each segment, and where each token lies among the keys i64[N]."""
        lengths = tuple((len(rows), len(tokens)) for rows, tokens in spans)
        return Segments(
            queries=_as_places(_indices([rows for rows, _ in spans])),
            keys=_as_places(places[_indices([tokens for _, tokens in spans])]),
            lengths=lengths,
            query_offsets=torch.tensor([0, *accumulate(queries for queries, _ in lengths)], dtype=torch.int32),
            key_offsets=torch.tensor([0, *accumulate(keys for _, keys in lengths)], dtype=torch.int32),
            is_causal=is_causal,
        )


@dataclass(frozen=True)
class Packing:
    """N packed tokens, of which M rows draft: those of one span lie behind each other, spans in order."""

    positions: torch.Tensor  # i64[N], of each token in its document
    rows: torch.Tensor  # i64[M], tokens from which drafts start
    prompts: torch.Tensor  # i64[N - M], the others, which give keys and values alone; those that no row sees come last
    places: torch.Tensor  # i64[N], where each token lies among the rows with the prompts behind them
    segments: tuple[Segments, ...]
    """Inside each span, causal; then all of its document before it, for spans that have something before: one span of each document
    at a time, so that no kernel takes more than N keys."""

    @property
    def num_pairs(self) -> float:
        """Of a row and a token that it sees."""
        seen = ((q * (k + 1) / 2 if part.is_causal else q * k) for part in self.segments for q, k in part.lengths)
        return sum(seen)

    @staticmethod
    def of(lengths: Sequence[int], spans: Sequence[tuple[int, int, int]] | None = None) -> "Packing":
        """Of documents of these lengths.

        Args:
            lengths: tokens of each document.
            spans: (document, first token in it, number of tokens) whose rows draft, in order; every token unless given.
        """
        spans = [(i, 0, length) for i, length in enumerate(lengths)] if spans is None else spans
        starts = [0, *accumulate(lengths)]
        first_rows = [0, *accumulate(count for *_, count in spans)]
        inside, before = [], defaultdict[int, list[tuple[range, range]]](list)
        turns = Counter[int]()  # of each document, its spans with something before them
        is_row, is_seen = np.zeros((2, starts[-1]), dtype=bool)
        for row, (document, first, count) in zip(first_rows, spans, strict=False):
            of_span, token = range(row, row + count), starts[document] + first
            inside.append((of_span, range(token, token + count)))
            is_row[token : token + count] = True
            if first:
                before[turns[document]].append((of_span, range(starts[document], token)))
                turns[document] += 1
                is_seen[starts[document] : token] = True
        rows, *prompts = (np.flatnonzero(part) for part in (is_row, is_seen & ~is_row, ~is_seen & ~is_row))
        places = np.concatenate([rows, *prompts]).argsort()
        return Packing(
            positions=torch.from_numpy(_indices([range(length) for length in lengths])),
            rows=torch.from_numpy(rows),
            prompts=torch.from_numpy(np.concatenate(prompts)),
            places=torch.from_numpy(places),
            segments=(
                Segments.of(inside, places, is_causal=True),
                *(Segments.of(turn, places, is_causal=False) for turn in before.values()),
            ),
        )

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What belongs to the tokens [N, ...], as what belongs to the rows [M, ...] and to the prompts [N - M, ...]."""
        if not len(self.prompts):
            return x, x[:0]
        reordered: torch.Tensor = _Reorder.apply(x, torch.cat([self.rows, self.prompts]), self.places)  # type: ignore[no-untyped-call]
        of_rows, of_prompts = reordered.split([len(self.rows), len(self.prompts)])
        return of_rows, of_prompts


def _indices(ranges: Sequence[range]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(part.start, part.stop) for part in ranges)])


def _as_places(indices: NDArray[np.int64]) -> Places:
    if (np.diff(indices) != 1).any():
        return torch.from_numpy(indices)
    first = int(indices[0]) if len(indices) else 0
    return slice(first, first + len(indices))


class _Reorder(torch.autograd.Function):
    """x[order]; the gradient is read in the inverse order, where that of indexing is added up row by row."""

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
