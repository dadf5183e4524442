"""Packed documents: which tokens are draft positions, and which keys they see."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

X = TypeVar("X")
Indices = slice | torch.Tensor
"""Indices of queries or keys: a slice if they are consecutive, which avoids a copy, else a tensor i64."""


@dataclass(frozen=True)
class Segments:
    """Input of one attention kernel. The queries of a segment see only the keys of the same segment."""

    queries: Indices
    """The draft positions in this kernel, as indices into all M."""
    keys: Indices
    """The keys in this kernel, as indices into all N: draft positions first, then all other tokens."""
    lengths: tuple[tuple[int, int], ...]  # number of queries and of keys in each segment
    query_offsets: torch.Tensor  # i32[segments + 1]
    key_offsets: torch.Tensor  # i32[segments + 1]
    is_causal: bool
    """Whether query i of a segment sees only its keys 0 .. i, rather than all of them."""

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The largest number of queries and of keys in a segment."""
        most_queries, most_keys = (max(counts) for counts in zip(*self.lengths, strict=True))
        return most_queries, most_keys

    @staticmethod
    def of(pairs: Sequence[tuple[range, range]], key_indices: NDArray[np.int64], is_causal: bool) -> "Segments":
        """Build the segments of a kernel from pairs of draft positions, as indices into all M, and visible tokens.

        `key_indices` has the index of each token in the order of the keys i64[N].
        """
        lengths = tuple((len(drafts), len(tokens)) for drafts, tokens in pairs)
        return Segments(
            queries=_as_indices(_concatenated([drafts for drafts, _ in pairs])),
            keys=_as_indices(key_indices[_concatenated([tokens for _, tokens in pairs])]),
            lengths=lengths,
            query_offsets=torch.tensor([0, *accumulate(queries for queries, _ in lengths)], dtype=torch.int32),
            key_offsets=torch.tensor([0, *accumulate(keys for _, keys in lengths)], dtype=torch.int32),
            is_causal=is_causal,
        )

    def runs(self, most: int) -> Iterator["Segments"]:
        """Yields runs of at most `most` segments, whose queries and keys are slices of this kernel's."""
        first_query = first_key = 0
        for first in range(0, len(self.lengths), most):
            lengths = self.lengths[first : first + most]
            num_queries, num_keys = (sum(counts) for counts in zip(*lengths, strict=True))
            queries, keys = slice(first_query, first_query + num_queries), slice(first_key, first_key + num_keys)
            query_offsets, key_offsets = (
                x[first : first + len(lengths) + 1] - x[first] for x in (self.query_offsets, self.key_offsets)
            )
            yield Segments(queries, keys, lengths, query_offsets, key_offsets, self.is_causal)
            first_query, first_key = queries.stop, keys.stop


@dataclass(frozen=True)
class Packing:
    """N packed tokens, of which M are draft positions, in token order.

    The draft positions are spans of consecutive tokens of a document (`of_spans`), or single tokens (`of_points`).
    """

    positions: torch.Tensor  # i64[N], position of each token in its document
    draft_positions: torch.Tensor  # i64[M], tokens that are draft positions
    other_tokens: torch.Tensor
    """i64[N - M], all other tokens. They only provide keys and values; those that no draft position sees come last."""
    key_indices: torch.Tensor
    """i64[N], index of each token in the order of the keys: draft positions first, then all other tokens."""
    segments: tuple[Segments, ...]
    """One for each kernel. The first one has every draft position once."""
    document_lengths: tuple[int, ...]
    document_drafts: tuple[int, ...]
    """Number of draft positions in each document."""
    document_offsets: torch.Tensor  # i64[documents + 1], first token of each document, then N
    window: int | None = None
    """Number of tokens that a draft position sees in `window_segments`, the last one its own; None without them."""
    window_segments: tuple[Segments, ...] = ()
    """Segments as in `segments`, for layers with that window."""

    @property
    def depths_share_targets(self) -> bool:
        """Whether depth k of a draft position learns the distribution that depth 0 of the k-th draft position after it
        learns, as within a span."""
        return self.segments[0].is_causal

    def num_pairs(self, sliding_share: float = 0.0) -> float:
        """Returns the number of pairs of a draft position and a token that it sees.

        With `sliding_share`, that of a head, the pairs with and without the window are averaged.
        """
        full, windowed = (
            sum((q * (k + 1) / 2 if part.is_causal else q * k) for part in segments for q, k in part.lengths)
            for segments in (self.segments, self.window_segments)
        )
        return full + sliding_share * (windowed - full)

    @property
    def num_document_pairs(self) -> float:
        """Number of pairs of a token and itself or an earlier token of its document."""
        return sum(length * (length + 1) / 2 for length in self.document_lengths)

    @staticmethod
    def of_spans(
        lengths: Sequence[int], spans: Sequence[tuple[int, int, int]] | None = None, window: int | None = None
    ) -> "Packing":
        """Pack documents whose draft positions are spans of consecutive tokens.

        The first kernel pairs every span with its own tokens, causally. Each of the others pairs spans, at most one per
        document, with the tokens before them in their document, so no kernel reads more than N keys.

        Args:
            lengths: number of tokens in each document.
            spans: (document, first token in the document, number of tokens) of each span of draft positions, in order;
                by default every token is a draft position.
            window: see `Packing.window`.
        """
        spans = [(i, 0, length) for i, length in enumerate(lengths)] if spans is None else spans
        starts = [0, *accumulate(lengths)]
        first_drafts = [0, *accumulate(count for *_, count in spans)]  # indices into all M
        # Pair each span's draft positions with the tokens of the span, and with the earlier tokens of its document.
        inside, before = [], defaultdict[int, list[tuple[range, range]]](list)
        num_before = Counter[int]()  # spans of each document that have tokens before them
        is_draft, is_seen = np.zeros((2, starts[-1]), dtype=bool)
        for first_draft, (document, first, count) in zip(first_drafts, spans, strict=False):
            drafts, token = range(first_draft, first_draft + count), starts[document] + first
            inside.append((drafts, range(token, token + count)))
            is_draft[token : token + count] = True
            if first:
                before[num_before[document]].append((drafts, range(starts[document], token)))
                num_before[document] += 1
                is_seen[starts[document] : token] = True
        kernels = [(inside, True), *((part, False) for part in before.values())]
        return Packing._ordered(lengths, is_draft, is_seen, kernels, window)

    @staticmethod
    def of_points(lengths: Sequence[int], points: Sequence[NDArray[np.int64]], window: int | None = None) -> "Packing":
        """Pack documents whose draft positions may lie anywhere.

        `lengths` are the numbers of tokens of the documents, and `points` the draft positions of each, at least one, in
        rising order.
        """
        starts, num_drafts, stairs = [0, *accumulate(lengths)], 0, _Stairs()
        is_draft, is_seen = np.zeros((2, starts[-1]), dtype=bool)
        for start, length, positions in zip(starts, lengths, points, strict=False):
            is_draft[start + positions], is_seen[start : start + positions[-1]] = True, True
            drafts = range(num_drafts, num_drafts + len(positions))
            stairs.add(drafts, (positions + 1).tolist(), range(start, start + length))
            num_drafts += len(positions)
        return Packing._ordered(lengths, is_draft, is_seen, [(part, False) for part in stairs.kernels], window)

    @staticmethod
    def _ordered(
        lengths: Sequence[int],
        is_draft: NDArray[np.bool_],
        is_seen: NDArray[np.bool_],
        kernels: Sequence[tuple[Sequence[tuple[range, range]], bool]],
        window: int | None,
    ) -> "Packing":
        """Returns a packing whose keys are in this order: draft positions, other tokens that are seen, the rest.

        `is_draft` and `is_seen` say whether each token is a draft position, and whether any draft position sees it [N];
        `kernels` has the draft positions and the tokens of the segments of each kernel, and whether it is causal.
        """
        draft_positions = np.flatnonzero(is_draft)
        other_tokens = np.concatenate([np.flatnonzero(is_seen & ~is_draft), np.flatnonzero(~is_seen & ~is_draft)])
        key_indices = np.concatenate([draft_positions, other_tokens]).argsort()
        return Packing(
            positions=torch.from_numpy(_concatenated([range(length) for length in lengths])),
            draft_positions=torch.from_numpy(draft_positions),
            other_tokens=torch.from_numpy(other_tokens),
            key_indices=torch.from_numpy(key_indices),
            segments=tuple(Segments.of(spans, key_indices, is_causal) for spans, is_causal in kernels),
            document_lengths=tuple(lengths),
            document_drafts=tuple(int(part.sum()) for part in np.split(is_draft, list(accumulate(lengths))[:-1])),
            document_offsets=torch.tensor([0, *accumulate(lengths)]),
            window=window,
            window_segments=() if window is None else _window_segments(lengths, is_draft, key_indices, window),
        )

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split values per token [N, ...] into those of draft positions [M, ...] and all other tokens [N - M, ...]."""
        if not len(self.other_tokens):
            return x, x[:0]
        order = torch.cat([self.draft_positions, self.other_tokens])
        reordered: torch.Tensor = _Reorder.apply(x, order, self.key_indices)  # type: ignore[no-untyped-call]
        of_drafts, of_others = reordered.split([len(self.draft_positions), len(self.other_tokens)])
        return of_drafts, of_others


class _Stairs:
    """Attention of draft positions, each of which sees more tokens of a list than the one before it.

    One kernel for each of A draft positions would be too many, and a single one would need a mask. In the first kernel,
    each is paired with the tokens that it sees and the one before does not. In each of log2(A) more kernels, neighbours
    are joined to pairs, fours and so on, and the second of two neighbours is paired with the tokens that are new to the
    first. Each draft position is so paired with each token that it sees once, and no kernel has one of them twice. All
    lists share the kernels.
    """

    def __init__(self) -> None:
        self._kernels = defaultdict[int, list[tuple[range, range]]](list)

    @property
    def kernels(self) -> list[list[tuple[range, range]]]:
        """The draft positions and the tokens of each kernel's segments. A CPU computes equal neighbours together."""
        kernels = (sorted(kernel, key=lambda pair: tuple(map(len, pair))) for kernel in self._kernels.values())
        return [kernel for kernel in kernels if kernel]

    def add(self, drafts: range, counts: Sequence[int], tokens: range) -> None:
        """Let each draft position see the first tokens of a list: `counts` of them, in rising order."""
        drafts = drafts[sum(count == 0 for count in counts) :]  # those that see none are left out
        bounds = [0, *(count for count in counts if count)]
        new = (tokens[first:end] for first, end in pairwise(bounds))
        self._kernels[0] += ((drafts[i : i + 1], seen) for i, seen in enumerate(new))
        size = 1
        while size < len(drafts):
            for middle in range(size, len(drafts), 2 * size):
                seen = tokens[bounds[middle - size] : bounds[middle]]
                self._kernels[size].append((drafts[middle : middle + size], seen))
            size *= 2


def _window_segments(
    lengths: Sequence[int], is_draft: NDArray[np.bool_], key_indices: NDArray[np.int64], window: int
) -> tuple[Segments, ...]:
    """Returns the kernels with which each draft position sees the last `window` tokens up to its own.

    Documents are cut into tiles of `window` tokens. A draft position sees the tokens of its own tile up to itself, and
    those of the tile before that are still inside its window: stairs that rise, and stairs that fall.
    """
    rising, falling, first_token, first_draft = _Stairs(), _Stairs(), 0, 0
    for length in lengths:
        for first in range(0, length, window):
            tile = range(first_token + first, first_token + min(first + window, length))
            inside = np.flatnonzero(is_draft[tile.start : tile.stop])
            drafts = range(first_draft, first_draft + len(inside))
            rising.add(drafts, (inside + 1).tolist(), tile)
            if first:
                tile_before = range(tile.start - 1, tile.start - 1 - window, -1)
                falling.add(drafts[::-1], (window - 1 - inside[::-1]).tolist(), tile_before)
            first_draft += len(inside)
        first_token += length
    return tuple(Segments.of(part, key_indices, False) for part in (*rising.kernels, *falling.kernels))


@dataclass(frozen=True)
class PackedTokens:
    """N packed tokens, as a head reads them in training."""

    target_states: torch.Tensor
    """The target's last hidden states, after the final norm [N, H], or the streams of `Head.read_layers` [N, L, H]."""
    input_ids: torch.Tensor  # i64[N]
    next_ids: torch.Tensor
    """i64[N]: the token after each token. At depth k, draft position t reads the one after token t + k."""
    packing: Packing

    def before_drafts(self, num_depths: int) -> torch.Tensor:
        """Returns the token before the draft of each depth at each draft position i64[T, M], that is t + 1 + k.

        Past the end of the batch, where no draft counts, it is the last token.
        """
        depths = torch.arange(num_depths, device=self.next_ids.device)
        return self.next_ids[(self.packing.draft_positions + depths[:, None]).clamp(max=len(self.next_ids) - 1)]


def map_tensors(x: X, function: Callable[[torch.Tensor], torch.Tensor]) -> X:
    """Returns a copy of a dataclass, or tuple of dataclasses, with the function applied to every tensor."""
    if isinstance(x, torch.Tensor):
        return function(x)  # type: ignore[return-value]
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{field.name: map_tensors(getattr(x, field.name), function) for field in fields(x)})
    if isinstance(x, tuple) and any(is_dataclass(part) for part in x):
        return tuple(map_tensors(part, function) for part in x)  # type: ignore[return-value]
    return x


def _concatenated(ranges: Sequence[range]) -> NDArray[np.int64]:
    lengths = np.array([len(part) for part in ranges], dtype=np.int64)
    starts, steps = np.array([(part.start, part.step) for part in ranges], dtype=np.int64).reshape(-1, 2).T
    index = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)  # in each range
    return np.repeat(starts, lengths) + np.repeat(steps, lengths) * index


def _as_indices(indices: NDArray[np.int64]) -> Indices:
    if (np.diff(indices) != 1).any():
        return torch.from_numpy(indices)
    first = int(indices[0]) if len(indices) else 0
    return slice(first, first + len(indices))


class _Reorder(torch.autograd.Function):
    """Computes x[order] for a permutation. Its backward gathers; plain indexing's backward would scatter-add."""

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
