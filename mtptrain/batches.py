"""Packed batches for training: which documents lie in which batch, and the aligned tensors of one batch.

The order of batches depends on the seed and the epoch alone, never on the number of ranks: step s of an epoch takes
`micro_batches_per_step` batches in a row, and rank r of W computes those with index r, r + W, ... among them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from mtptrain.fp8 import decode, decode_into
from mtptrain.heads.attention import Packing
from mtptrain.hidden_store import HiddenStore, StoredDocument, scales_of


@dataclass(frozen=True)
class Batch:
    """Whole documents packed without padding, and what each depth of each row reads and predicts."""

    hidden_states: torch.Tensor
    """Last layer before the final norm [N, H], as stored until `to` decodes it."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [N, L, H], for heads that read them; likewise."""
    next_ids: torch.Tensor
    """i64[T, N]: depth k of row t reads token t + 1 + k; 0 behind the end of a document, where nothing counts."""
    is_draft: torch.Tensor
    """bool[T, N]: depth k of row t is a draft that serving makes, so it counts."""
    supervised_positions: torch.Tensor
    """i64[M]: positions t + 1 + k of at least one draft, whose target distribution teaches."""
    num_drafts: torch.Tensor
    """f32[T]: drafts that count, by depth."""
    packing: Packing
    document_ids: tuple[int, ...]
    hidden_states_scales: torch.Tensor | None = None
    """f32[N], where the states are e4m3."""
    aux_hidden_states_scales: torch.Tensor | None = None
    """f32[N, L], likewise."""

    @property
    def num_tokens(self) -> int:
        return self.hidden_states.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """On a device, the states in `dtype`: eight bits cross the bus as eight bits."""

        def move(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, non_blocking=True)

        def states(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            return move(x).to(dtype) if scales is None else decode(move(x), move(scales), dtype)

        return Batch(
            hidden_states=states(self.hidden_states, self.hidden_states_scales),
            aux_hidden_states=(
                None if self.aux_hidden_states is None else states(self.aux_hidden_states, self.aux_hidden_states_scales)
            ),
            next_ids=move(self.next_ids),
            is_draft=move(self.is_draft),
            supervised_positions=move(self.supervised_positions),
            num_drafts=move(self.num_drafts),
            packing=Packing(self.packing.runs, move(self.packing.positions)),
            document_ids=self.document_ids,
        )


class StateBuffers:
    """Memory of batches that are done with, for the states of those to come: on a CPU, fresh pages cost more than a copy into them."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._free: list[torch.Tensor] = []

    def take(self, num_tokens: int, row_shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """[num_tokens, *row_shape], filled with anything."""
        wanted = (dtype, row_shape)
        fitting = (
            i for i, buffer in enumerate(self._free) if (buffer.dtype, buffer.shape[1:]) == wanted and len(buffer) >= num_tokens
        )
        found = next(fitting, None)
        if found is None:
            return torch.empty(max(num_tokens, self._batch_tokens), *row_shape, dtype=dtype)[:num_tokens]
        return self._free.pop(found)[:num_tokens]

    def give_back(self, batch: Batch) -> None:
        """Nothing may read the states of this batch from now on."""
        states = (batch.hidden_states, batch.aux_hidden_states)
        self._free += [x if x._base is None else x._base for x in states if x is not None]


def make_batch(
    documents: Sequence[StoredDocument], ttt_steps: int, decode_states: bool = False, buffers: StateBuffers | None = None
) -> Batch:
    """Pack documents, longest first, and align every depth by design: the draft of token j at depth k counts only if tokens
    j-1-k .. j all lie in one generated span of one document.

    Args:
        documents: of one store.
        ttt_steps: T.
        decode_states: those of eight bits here and now, for a batch that stays on the CPU.
        buffers: where the states are to lie; in memory of their own without.
    """
    documents = sorted(documents, key=lambda document: len(document.input_ids), reverse=True)
    lengths = [len(document.input_ids) for document in documents]
    input_ids = torch.cat([document.input_ids for document in documents]).long()  # [N]
    generated = torch.cat([document.loss_mask for document in documents]).bool()
    packing = Packing.of(lengths)
    tokens_left = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths)) - packing.positions  # own one included

    def ahead(x: torch.Tensor, by: int) -> torch.Tensor:
        """x[t + by], zero behind the end of t's document."""
        return torch.where(tokens_left > by, torch.roll(x, -by), torch.zeros_like(x))

    next_ids = torch.stack([ahead(input_ids, 1 + depth) for depth in range(ttt_steps)])  # [T, N]
    span = ahead(generated, 1)  # token t + 1 is generated, and all since
    is_draft = torch.stack([span := span & ahead(generated, 2 + depth) for depth in range(ttt_steps)])
    is_teacher = torch.zeros_like(generated)
    for depth in range(ttt_steps):
        is_teacher |= torch.roll(is_draft[depth], 1 + depth)
    hidden_states, hidden_states_scales = pack_states(documents, "hidden_states", decode_states, buffers)
    aux_hidden_states, aux_hidden_states_scales = pack_states(documents, "aux_hidden_states", decode_states, buffers)
    assert hidden_states is not None
    return Batch(
        hidden_states=hidden_states,
        aux_hidden_states=aux_hidden_states,
        next_ids=next_ids,
        is_draft=is_draft,
        supervised_positions=is_teacher.nonzero()[:, 0],
        num_drafts=is_draft.sum(1, dtype=torch.float32),
        packing=packing,
        document_ids=tuple(document.document_id for document in documents),
        hidden_states_scales=hidden_states_scales,
        aux_hidden_states_scales=aux_hidden_states_scales,
    )


def pack_states(
    documents: Sequence[StoredDocument], name: str, decode_states: bool, buffers: StateBuffers | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """States [N, ..., H] of all documents behind each other, and the scales [N, ...] of those that are still e4m3."""
    states = [part for document in documents if (part := getattr(document, name)) is not None]
    scales = [part for document in documents if (part := getattr(document, scales_of(name))) is not None]
    if not states:
        return None, None
    buffers = buffers or StateBuffers(0)
    lengths, row_shape = [len(part) for part in states], states[0].shape[1:]
    if scales and decode_states:
        packed = buffers.take(sum(lengths), row_shape, torch.bfloat16)
        for out, values, document_scales in zip(packed.split(lengths), states, scales, strict=True):
            decode_into(out, values, document_scales)
        return packed, None
    packed = torch.cat(states, out=buffers.take(sum(lengths), row_shape, states[0].dtype))
    return packed, torch.cat(scales) if scales else None


def pack_documents(lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Document indices of every batch of an epoch: a shuffle, cut where the next document would pass `batch_tokens`.

    Raises:
        ValueError: a document is longer than a batch.
    """
    if lengths.max() > batch_tokens:
        raise ValueError(
            f"train.batch_tokens: must be at least the longest document, {lengths.max()} tokens, but is {batch_tokens}; raise it or "
            "lower prompts.max_document_tokens and run data_prep.prompts and data_prep.hidden_states again"
        )
    batches: list[list[int]] = [[]]
    room = batch_tokens
    for index in np.random.default_rng([seed, epoch]).permutation(len(lengths)):
        if lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(int(index))
        room -= int(lengths[index])
    return batches


class BatchSchedule:
    """Every step's batches, known from the start: resuming is counting. Steps are asked for in rising order."""

    def __init__(
        self,
        store: HiddenStore,
        ttt_steps: int,
        batch_tokens: int,
        micro_batches_per_step: int,
        seed: int,
        decode_states: bool = False,
    ) -> None:
        self.store = store
        self.decode_states = decode_states
        self.ttt_steps = ttt_steps
        self.batch_tokens = batch_tokens
        self.micro_batches_per_step = micro_batches_per_step
        self.seed = seed
        self._buffers = StateBuffers(batch_tokens)
        self._epoch, self._first_batch = 0, 0  # of the epoch in _packed
        self._packed = pack_documents(store.document_lengths, batch_tokens, seed, epoch=0)
        self.steps_per_epoch = len(self._packed) // micro_batches_per_step
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"train.micro_batches_per_step: must be at most the number of batches, but is {micro_batches_per_step} with "
                f"{len(self._packed)} batches of {batch_tokens} tokens in {store.directory}; lower it or train.batch_tokens"
            )

    def _documents_of(self, batch: int) -> list[int]:
        """Document indices of a batch, counted over all epochs."""
        while batch >= self._first_batch + len(self._packed):
            self._first_batch += len(self._packed)
            self._epoch += 1
            self._packed = pack_documents(self.store.document_lengths, self.batch_tokens, self.seed, self._epoch)
        return self._packed[batch - self._first_batch]

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[Batch]:
        """This rank's batches of a step."""
        first = step * self.micro_batches_per_step
        return [
            make_batch(
                [self.store.document(i) for i in self._documents_of(batch)], self.ttt_steps, self.decode_states, self._buffers
            )
            for batch in range(first + rank, first + self.micro_batches_per_step, world_size)
        ]

    def prefetch(self, first_step: int, last_step: int, rank: int, world_size: int) -> Iterator[list[Batch]]:
        """This rank's batches of steps first_step .. last_step - 1, each read while the step before it runs.

        The states of a step's batches are overwritten once those of the next step are asked for.
        """
        with ThreadPoolExecutor(max_workers=1) as reader:
            coming = reader.submit(self.micro_batches, first_step, rank, world_size) if first_step < last_step else None
            for step in range(first_step, last_step):
                assert coming is not None
                ready = coming.result()
                coming = reader.submit(self.micro_batches, step + 1, rank, world_size) if step + 1 < last_step else None
                yield ready
                for batch in ready:
                    self._buffers.give_back(batch)
