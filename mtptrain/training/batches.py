"""Packed batches for training: the aligned tensors of one batch, and the batches of every step.

The documents of a step depend on the store, the settings and the epoch, never on the number of ranks: a step has
`micro_batches_per_step` batches of about equal cost, and rank r of W computes those with indices r, r + W, ...
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.heads.packing import Packing, map_tensors
from mtptrain.hidden_states.fp8 import decode, decode_into
from mtptrain.hidden_states.shard_format import scales_of
from mtptrain.hidden_states.store import HiddenStates, StoredDocument
from mtptrain.training.step_packing import Anchors, Step, balance, document_costs, pack_documents, shuffled
from mtptrain.utils.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Documents packed without padding, each cut after the last token that a draft needs."""

    hidden_states: torch.Tensor
    """Output of the last layer, before the final norm [N, H]; in the store's dtype until `to` decodes it."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [N, L, H], for heads that read them; in the store's dtype until `to` decodes it."""
    input_ids: torch.Tensor  # i64[N]
    next_ids: torch.Tensor
    """i64[N]: the token that follows each token. Depth k at draft position t reads the one that follows token t + k."""
    is_draft: torch.Tensor
    """bool[T, M]: whether the draft at depth k of a draft position counts in the loss."""
    num_drafts: torch.Tensor
    """f32[T]: number of drafts that count in the loss, by depth."""
    packing: Packing
    document_ids: tuple[int, ...]
    document_tokens: int
    """Number of tokens of the whole documents, including those that were cut off."""
    hidden_states_scales: torch.Tensor | None = None
    """f32[N]: scales of the states if they are e4m3, otherwise None."""
    aux_hidden_states_scales: torch.Tensor | None = None
    """f32[N, L]: scales of the captured streams if they are e4m3, otherwise None."""

    @property
    def num_tokens(self) -> int:
        return self.hidden_states.shape[0]

    @property
    def num_draft_positions(self) -> int:
        return self.is_draft.shape[1]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """Returns the batch on `device` with states decoded to `dtype`. e4m3 states are decoded on the device."""
        moved = map_tensors(self, lambda x: x.to(device, non_blocking=True))
        decoded: dict[str, Any] = {"hidden_states_scales": None, "aux_hidden_states_scales": None}
        for name in ("hidden_states", "aux_hidden_states"):
            states, scales = getattr(moved, name), getattr(moved, scales_of(name))
            if states is not None:
                decoded[name] = states.to(dtype) if scales is None else decode(states, scales, dtype)
        return replace(moved, **decoded)


def make_batch(
    documents: Sequence[StoredDocument],
    ttt_steps: int,
    decode_states: bool = False,
    pins: bool = False,
    anchors: Anchors | None = None,
    window: int | None = None,
) -> Batch:
    """Pack documents into a batch. Documents without a draft position are left out.

    The draft of token j at depth k counts only if tokens j-1-k .. j are all in one generated span of one document.
    `decode_states` decodes e4m3 states now, for a batch that stays on the CPU; `pins` puts them into pinned memory,
    from which a GPU can copy them while it computes. `anchors` choose the draft positions; None uses all of them.
    """
    kept: list[StoredDocument] = []
    spans: list[tuple[int, int, int]] = []  # (document, first draft position, number of draft positions)
    used, draft_positions, left_in_span = [], [], []
    for document in sorted(documents, key=lambda document: len(document.input_ids), reverse=True):
        firsts, counts = (x.tolist() for x in draft_spans(document.loss_mask.numpy()))
        own = list(zip(firsts, counts, strict=True))
        if own:
            spans += [(len(kept), first, count) for first, count in own]
            positions = np.concatenate([np.arange(first, first + count) for first, count in own])
            # Number of draft positions from each one to the end of its span, itself included.
            left = np.concatenate([np.arange(count, 0, -1) for count in counts])
            if anchors is not None:
                chosen = anchors.draw(document.document_id, len(positions))
                positions, left = positions[chosen], left[chosen]
            kept.append(document)
            draft_positions.append(positions)
            left_in_span.append(left)
            # The last token needed is the one whose state gives the label of a draft position's last depth.
            used.append(int((positions + np.minimum(left, ttt_steps)).max()) + 1)
    assert kept, "no document has a draft"
    packing = (
        Packing.of_spans(used, spans, window) if anchors is None else Packing.of_points(used, draft_positions, window)
    )
    hidden_states, hidden_states_scales = pack_states(kept, used, "hidden_states", decode_states, pins)
    aux_hidden_states, aux_hidden_states_scales = pack_states(kept, used, "aux_hidden_states", decode_states, pins)
    assert hidden_states is not None
    is_draft = torch.from_numpy(np.concatenate(left_in_span)) > torch.arange(ttt_steps)[:, None]  # [T, M]
    return Batch(
        hidden_states=hidden_states,
        aux_hidden_states=aux_hidden_states,
        input_ids=_token_ids(kept, used, first=0),
        next_ids=_token_ids(kept, used, first=1),
        is_draft=is_draft,
        num_drafts=is_draft.sum(1, dtype=torch.float32),
        packing=packing,
        document_ids=tuple(document.document_id for document in kept),
        document_tokens=sum(len(document.input_ids) for document in kept),
        hidden_states_scales=hidden_states_scales,
        aux_hidden_states_scales=aux_hidden_states_scales,
    )


def _token_ids(documents: Sequence[StoredDocument], used: Sequence[int], first: int) -> torch.Tensor:
    """Returns `used` token ids of each document, starting at its token `first`, i64[N]."""
    ids = [document.input_ids[first : first + count] for document, count in zip(documents, used, strict=True)]
    return torch.cat(ids).long()


def draft_spans(loss_mask: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the first draft position and the length of each span of draft positions.

    t is a draft position if tokens t + 1 and t + 2 are generated.
    """
    drafts = (loss_mask[1:-1] & loss_mask[2:]).astype(np.int8)
    edges = np.diff(drafts, prepend=0, append=0)
    firsts = np.flatnonzero(edges == 1)
    return firsts, np.flatnonzero(edges == -1) - firsts


def pack_states(
    documents: Sequence[StoredDocument],
    used: Sequence[int],
    name: str,
    decode_states: bool,
    pins: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the states [N, ..., H] of each document's first `used` tokens, and scales [N, ...] if they stay e4m3."""
    states, scales = (
        [
            part[:count]
            for document, count in zip(documents, used, strict=True)
            if (part := getattr(document, field)) is not None
        ]
        for field in (name, scales_of(name))
    )
    if not states:
        return None, None
    lengths, token_shape = [len(part) for part in states], states[0].shape[1:]
    is_decoded = bool(scales) and decode_states
    dtype = torch.bfloat16 if is_decoded else states[0].dtype
    packed = torch.empty(sum(lengths), *token_shape, dtype=dtype, pin_memory=pins)
    if is_decoded:
        for out, values, document_scales in zip(packed.split(lengths), states, scales, strict=True):
            decode_into(out, values, document_scales)
        return packed, None
    torch.cat(states, out=packed)
    return packed, torch.cat(scales) if scales else None


@dataclass
class BatchSchedule:
    """The batches of every step. They are fixed from the start, so that resuming only needs the step number.

    Steps must be requested in increasing order. Each epoch has another order of documents."""

    store: HiddenStates
    ttt_steps: int
    batch_tokens: int
    """Maximum number of tokens of a micro-batch."""
    micro_batches_per_step: int
    """Micro-batches of a step over all ranks."""
    seed: int
    for_gpu: bool = True
    """Whether a thread reads ahead, into pinned memory."""
    drafts_per_document: int | None = None
    """Number of draft positions of a document, drawn at random in every epoch; None for all."""
    window: int | None = None
    """`Head.shared_window`."""

    def __post_init__(self) -> None:
        """Pack the first epoch."""
        self.costs = document_costs(self.store, self.drafts_per_document or math.inf)
        self._pins = self.for_gpu and torch.cuda.is_available()
        self._epoch, self._first_step = 0, 0  # the epoch in `_packed` and its first step
        self._packed = self._pack(epoch=0)
        self.steps_per_epoch = len(self._packed)
        if self.steps_per_epoch == 0:
            raise UserError(
                "train.micro_batches_per_step: must be at most the number of documents with draft positions, but is "
                f"{self.micro_batches_per_step}, and {self.store.directory} has {np.count_nonzero(self.costs)} such "
                "documents; lower it, or train on more documents"
            )

    def _pack(self, epoch: int) -> list[Step]:
        lengths, fixed = self.store.document_lengths, self.store.order
        order = shuffled(len(lengths), self.seed, epoch) if fixed is None else fixed
        return pack_documents(lengths, self.costs, self.batch_tokens, self.micro_batches_per_step, order, fixed is None)

    @property
    def first_epoch(self) -> list[Step]:
        """Returns the document indices of every micro-batch of every step of the first epoch."""
        return self._packed if self._epoch == 0 else self._pack(0)

    def documents_of(self, step: int) -> Step:
        """Returns the document indices of each micro-batch of a step. Step numbers continue across epochs."""
        while step >= self._first_step + len(self._packed):
            self._first_step += len(self._packed)
            self._epoch += 1
            self._packed = self._pack(self._epoch)
        documents = self._packed[step - self._first_step]
        return balance(documents, self.store.document_lengths, self.costs, self.batch_tokens)

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[Batch]:
        """Returns a rank's batches of a step, in pinned memory if there is a GPU, so that copies overlap with steps."""
        of_rank, most = self.documents_of(step)[rank::world_size], self.drafts_per_document
        anchors = None if most is None else Anchors(most, (self.seed, self._epoch))
        stored = ([self.store.document(i) for i in documents] for documents in of_rank)
        make = partial(make_batch, decode_states=not self.for_gpu, pins=self._pins, anchors=anchors, window=self.window)
        batches = (make(documents, self.ttt_steps) for documents in stored)
        if not self._pins:
            return list(batches)
        return [map_tensors(batch, lambda x: x if x.is_pinned() else x.pin_memory()) for batch in batches]

    def prefetch(self, first_step: int, last_step: int, rank: int, world_size: int) -> Iterator[list[Batch]]:
        """Yields this rank's batches of steps first_step .. last_step - 1. Closes the store at the end.

        For a GPU, they are read during the previous step. On a CPU, nothing is read ahead: a concurrent reader slows
        the step by a third, while reading between steps slows it by 1 %.
        """
        reader = ThreadPoolExecutor(max_workers=1) if self.for_gpu else None
        pending: Future[list[Batch]] | None = None
        try:
            for step in range(first_step, last_step):
                ready = self.micro_batches(step, rank, world_size) if pending is None else pending.result()
                if reader is not None and step + 1 < last_step:
                    pending = reader.submit(self.micro_batches, step + 1, rank, world_size)
                yield ready
        finally:
            self.store.close()  # first, so that a reader that waits for a streamed shard ends
            if reader is not None:
                reader.shutdown()
