"""Streaming: extraction and training run at the same time, over a store that never holds more than a few windows of shards.

The seed shuffles the shards, and every `train.stream_shards` of them form a window. data_prep.hidden_states writes the shards of the
first `OPEN_WINDOWS` windows that training has not released. mtptrain.train waits for the shards that its next step reads; after a
checkpoint it releases the windows that no later step reads, which deletes their shards. `stream.json` in the folder of the store
holds the number of released windows. The two programs tell each other nothing else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mtptrain.hidden_store import MANIFEST, PLAN, SCHEMA_VERSION, HiddenStore, Manifest, ShardRecord, read_json
from mtptrain.hidden_store_writer import read_record, record_path, shard_path, shard_ranges
from mtptrain.identity import StoreIdentity, identity_from_json, refuse_other
from mtptrain.prompt_files import Documents
from mtptrain.run_dir import write_json

STREAM = "stream.json"
OPEN_WINDOWS = 3
"""Windows on disk at once: the last documents of one are still read, one is trained on, and one is written."""
POLL_S = 0.2
"""Seconds between two looks at what the other program has done."""
SAID_AFTER_S = 10.0
"""Seconds of waiting before the program says what it waits for."""
SHARD_ORDER, DOCUMENT_ORDER = 1_000_001, 1_000_002
"""Keep the random numbers of the two orders apart from those of the epochs."""


def shard_windows(num_shards: int, window_shards: int, seed: int) -> list[list[int]]:
    """Returns the shards of each window, in the order of training. It depends on the seed alone, never on the number of ranks."""
    order = np.random.default_rng([seed, SHARD_ORDER]).permutation(num_shards).tolist()
    return [order[first : first + window_shards] for first in range(0, num_shards, window_shards)]


def document_order(windows: Sequence[Sequence[int]], shards: Sequence[range], seed: int) -> NDArray[np.int64]:
    """Returns all documents [D], window after window, shuffled within each."""
    generator = np.random.default_rng([seed, DOCUMENT_ORDER])
    return np.concatenate([generator.permutation(np.concatenate([shards[shard] for shard in window])) for window in windows])


def released_windows(store_dir: Path) -> int:
    """Returns how many windows training has released so far."""
    path = store_dir / STREAM
    return int(read_json(path)["released_windows"]) if path.exists() else 0


def missing_open_shards(store_dir: Path, windows: Sequence[Sequence[int]]) -> list[int] | None:
    """Returns the shards that extraction has to write now; None once training has released every window."""
    while True:
        released = released_windows(store_dir)
        if released >= len(windows):
            return None
        shards = chain.from_iterable(windows[released : released + OPEN_WINDOWS])
        missing = [shard for shard in shards if read_record(store_dir, shard) is None]
        if released_windows(store_dir) == released:  # else some may be missing because they were just released
            return missing


def wait_until(is_done: Callable[[], bool], waiting_for: str) -> None:
    """Returns once the other program has done its part; says what is missing where that takes a while."""
    started, is_said = time.monotonic(), False
    while not is_done():
        if not is_said and time.monotonic() - started > SAID_AFTER_S:
            tqdm.write(f"waiting for {waiting_for}")
            is_said = True
        time.sleep(POLL_S)


class StreamedStore(HiddenStore):
    """A store whose shards appear and disappear while it is read. Lengths and loss masks come from the prompts."""

    def __init__(
        self, directory: Path, identity: StoreIdentity, documents: Documents, shard_tokens: int, window_shards: int, seed: int
    ) -> None:
        """Describe a store without looking at it; `open_stream` checks what is on the disk.

        Args:
            directory: of the store.
            identity: what the states belong to.
            documents: the prompts that the states are extracted from.
            shard_tokens: as in `shard_ranges`.
            window_shards: `train.stream_shards`.
            seed: of the run.
        """
        self.documents = documents
        self.ranges = shard_ranges(documents.lengths, shard_tokens)
        self.windows = shard_windows(len(self.ranges), window_shards, seed)
        self.order = document_order(self.windows, self.ranges, seed)
        num_tokens, num_supervised = len(documents.input_ids), int(documents.loss_mask.sum())
        counts = (len(documents), num_tokens, num_supervised)
        super().__init__(directory, Manifest(SCHEMA_VERSION, identity, shard_tokens, 0, *counts, shards=()))
        self._first_documents = np.cumsum([0, *map(len, self.ranges)])  # [shards + 1]
        self._records: dict[int, ShardRecord] = {}
        self._is_closed = False

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        return self.documents.lengths

    @property
    def document_ids(self) -> NDArray[np.int64]:
        return self.documents.document_ids

    def loss_masks(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        yield self.documents.loss_mask, self.documents.document_offsets

    def _record(self, index: int) -> ShardRecord:
        """Returns the record of a shard, once extraction has finished it."""
        if index not in self._records:
            path = shard_path(self.directory, index)
            wait_until(
                lambda: self._is_closed or record_path(path).exists(),
                f"{path.name}, which data_prep.hidden_states with the same settings writes",
            )
            record = read_record(self.directory, index)
            if record is None:
                raise RuntimeError(f"{path}: must stay until training releases it, but is gone; run both programs again")
            self._records[index] = record
        return self._records[index]

    def close(self) -> None:
        """Unmap all shards, and wait for no further one: a thread that reads ahead then ends."""
        self._is_closed = True
        super().close()

    def forget(self, windows: Sequence[Sequence[int]]) -> None:
        """Unmaps the shards of windows: a deleted file takes its space until nobody maps it."""
        for shard in chain.from_iterable(windows):
            self._mapped.pop(shard, None)
            self._records.pop(shard, None)


def open_stream(
    directory: Path, expected: StoreIdentity, documents: Documents, shard_tokens: int, window_shards: int, seed: int
) -> StreamedStore:
    """Open a store that extraction fills while it is read, once extraction has begun it.

    Raises:
        ValueError: the store is a finished one, or belongs to something else.
    """
    if (directory / MANIFEST).exists():
        raise ValueError(
            f"train.stream: must be false where the hidden states are finished, but is true with {directory / MANIFEST}; set "
            "train.stream=false, which trains on all of them, or choose another run_dir"
        )
    wait_until((directory / PLAN).exists, f"{directory / PLAN}, which data_prep.hidden_states with the same settings writes")
    plan = read_json(directory / PLAN)
    found = identity_from_json(plan["identity"])
    refuse_other(directory / PLAN, expected, found, shard_tokens, plan["shard_tokens"])
    return StreamedStore(directory, expected, documents, shard_tokens, window_shards, seed)


class Releases:
    """Knows after which steps the windows of a store are no longer read, and releases them."""

    def __init__(self, store: StreamedStore, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Find the first and the last step of every window.

        Args:
            store: that the steps read.
            steps: the documents of every micro-batch of every step.

        Raises:
            ValueError: a step reads documents of more windows than may be on disk.
        """
        self.store = store
        window_of = _window_of_documents(store)
        first, last = np.full(len(store.windows), len(steps)), np.zeros(len(store.windows), np.int64)
        for step, micro_batches in enumerate(steps):
            read = np.unique(window_of[list(chain.from_iterable(micro_batches))])
            first[read] = np.minimum(first[read], step)
            last[read] = step + 1
        self._unread_after = np.maximum.accumulate(last)  # steps [W] after which neither a window nor one before it is read
        if (self._unread_after[:-OPEN_WINDOWS] > first[OPEN_WINDOWS:]).any():
            raise ValueError(
                f"train.stream_shards: {OPEN_WINDOWS} windows must hold all documents of a step, but those of "
                f"{len(store.windows[0])} shards do not; raise it, or hidden_states.shard_tokens"
            )

    def num_unread(self, step: int) -> int:
        """Returns the number of windows that no step from `step` on reads."""
        return int(np.searchsorted(self._unread_after, step, side="right"))

    def is_due(self, step: int) -> bool:
        """Returns whether the step just done, number `step` from 1, was the last to read a window: a checkpoint then frees disk."""
        return self.num_unread(step) > self.num_unread(step - 1)

    def release(self, step: int, is_last: bool, is_first_rank: bool) -> None:
        """Deletes the shards that no step after a checkpoint at `step` reads, all of them after the last one.

        A run that goes on from an earlier step than it had reached takes releases back: extraction writes these windows again.
        """
        count = len(self.store.windows) if is_last else self.num_unread(step)
        self.store.forget(self.store.windows[:count])
        if is_first_rank:
            write_json(self.store.directory / STREAM, {"released_windows": count})
            for shard in chain.from_iterable(self.store.windows[:count]):
                path = shard_path(self.store.directory, shard)
                record_path(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)


def _window_of_documents(store: StreamedStore) -> NDArray[np.int64]:
    """Returns the window of each document [D]."""
    windows = np.empty(store.num_documents, np.int64)
    for number, window in enumerate(store.windows):
        for shard in window:
            windows[store.ranges[shard].start : store.ranges[shard].stop] = number
    return windows
