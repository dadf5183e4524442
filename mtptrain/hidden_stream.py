"""Streaming: extraction and training run at the same time, over a store that never holds more than a few windows of shards.

The seed shuffles the shards, and every `train.stream_shards` of them form a window. data_prep.hidden_states writes the shards of the
first `OPEN_WINDOWS` windows that training has not released. mtptrain.train waits for the shards that its next step reads; after a
checkpoint it releases the windows that no later step reads, which deletes their shards. `stream.json` in the folder of the store
holds the number of released windows. The two programs tell each other nothing else.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mtptrain.hidden_store import MANIFEST, PLAN, SCHEMA_VERSION, HiddenStore, Manifest, ShardRecord, read_json
from mtptrain.hidden_store_writer import read_record, record_path, shard_path, shard_ranges, write_json
from mtptrain.identity import StoreIdentity, identity_from_json, refuse_other
from mtptrain.prompt_files import Documents

STREAM = "stream.json"
OPEN_WINDOWS = 3
"""Windows on disk at once: the last documents of one are still read, one is trained on, and one is written."""
POLL_S = 0.2
"""Seconds between two looks at what the other program has done."""
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


def window_of_documents(windows: Sequence[Sequence[int]], shards: Sequence[range]) -> NDArray[np.int64]:
    """Returns the window of each document [D]."""
    windows_of = np.empty(sum(map(len, shards)), np.int64)
    for number, window in enumerate(windows):
        for shard in window:
            windows_of[shards[shard].start : shards[shard].stop] = number
    return windows_of


def released_windows(store_dir: Path) -> int:
    """Returns how many windows training has released so far."""
    path = store_dir / STREAM
    return int(read_json(path)["released_windows"]) if path.exists() else 0


def open_shards(store_dir: Path, windows: Sequence[Sequence[int]]) -> list[int] | None:
    """Returns the shards that extraction may write now; None once every window is released."""
    released = released_windows(store_dir)
    if released >= len(windows):
        return None
    return [shard for window in windows[released : released + OPEN_WINDOWS] for shard in window]


def wait_until(is_there: Callable[[], bool], waiting_for: str, show: bool = True) -> None:
    """Return once the other program has done its part; says what is missing if that takes more than a moment."""
    started, is_said = time.monotonic(), not show
    while not is_there():
        if not is_said and time.monotonic() - started > 10:
            tqdm.write(f"waiting for {waiting_for}")
            is_said = True
        time.sleep(POLL_S)


class StreamedStore(HiddenStore):
    """A store whose shards appear and disappear while it is read. Lengths and loss masks come from the prompts."""

    def __init__(
        self, directory: Path, identity: StoreIdentity, documents: Documents, shard_tokens: int, window_shards: int, seed: int
    ) -> None:
        """Describe a store without looking at it; `open_stream` checks it.

        Args:
            directory: of the store.
            identity: what the states belong to.
            documents: the prompts that it is made from.
            shard_tokens: as in `shard_ranges`.
            window_shards: `train.stream_shards`.
            seed: of the run.
        """
        self.documents = documents
        self.ranges = shard_ranges(documents.lengths, shard_tokens)
        self.windows = shard_windows(len(self.ranges), window_shards, seed)
        self.order = document_order(self.windows, self.ranges, seed)
        supervised = int(documents.loss_mask.sum())
        super().__init__(
            directory,
            Manifest(SCHEMA_VERSION, identity, shard_tokens, 0, len(documents), len(documents.input_ids), supervised, ()),
        )
        self._first_documents = np.cumsum([0, *map(len, self.ranges)])  # [shards + 1]
        self.document_lengths = documents.lengths
        self.document_ids = documents.document_ids

    def loss_masks(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        yield self.documents.loss_mask, self.documents.document_offsets

    def _record(self, index: int) -> ShardRecord:
        """Waits for extraction to finish the shard."""
        path = record_path(self.directory, index)
        wait_until(path.exists, f"the hidden states of {shard_path(self.directory, index).name}: is data_prep.hidden_states running?")
        record = read_record(self.directory, index)
        assert record is not None, "only training deletes shards"
        return record


class Releases:
    """Says after which steps the windows of a store can be released, and releases them."""

    def __init__(self, store: StreamedStore, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Take the documents of every micro-batch of every step.

        Raises:
            ValueError: a step would wait for a shard that extraction may not write yet.
        """
        self.store = store
        window_of = window_of_documents(store.windows, store.ranges)
        first, last = np.full(len(store.windows), len(steps)), np.zeros(len(store.windows), np.int64)
        for step, micro_batches in enumerate(steps):
            read = np.unique(window_of[list(chain.from_iterable(micro_batches))])
            first[read], last[read] = np.minimum(first[read], step), step + 1
        self.done_after = np.maximum.accumulate(last)
        """Steps [W] after which training reads no document of a window, nor of the windows before it."""
        early = np.flatnonzero(self.done_after[: -OPEN_WINDOWS + 1] > first[OPEN_WINDOWS - 1 :])
        if len(early):
            raise ValueError(...)
