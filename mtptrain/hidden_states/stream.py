"""Streaming: extraction and training run at the same time, on a store that holds only a few windows of shards.

The seed shuffles the shards, which are then divided into windows of `train.stream_shards` shards.
mtptrain hidden-states writes the shards of the first `OPEN_WINDOWS` windows that training has not released.
mtptrain train waits for the shards that its next step reads. After a checkpoint, it releases the windows that no later
step reads and deletes their shards. The two programs communicate only through files in the store's folder:
`stream.json` holds the windows and the number of released ones.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mtptrain.data.identity import StoreIdentity, identity_from_json, refuse_other
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.store import (
    MANIFEST,
    PLAN,
    SCHEMA_VERSION,
    HiddenStore,
    ShardRecord,
    StoreManifest,
    read_record_file,
)
from mtptrain.hidden_states.writer import read_record, record_path, shard_path, shard_ranges
from mtptrain.utils.distributed import Ranks, StopSignal
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed

STREAM = "stream.json"
OPEN_WINDOWS = 3
"""Maximum number of windows on disk: training finishes one and starts the next while extraction writes the third."""
POLL_S = 0.2
"""Seconds between two checks of the other program's progress."""
REPORT_AFTER_S = 10.0
"""Seconds of waiting before a program prints what it is waiting for."""
SHARD_ORDER, DOCUMENT_ORDER = 1_000_001, 1_000_002
"""Numbers that seed the order of shards and the order of documents, together with the run's seed.

They must differ from the epoch numbers, which seed the order of each epoch."""


def shard_windows(num_shards: int, window_shards: int, seed: int) -> list[list[int]]:
    """Returns the shards of each window, in training order. The order does not depend on the number of ranks."""
    order = np.random.default_rng([seed, SHARD_ORDER]).permutation(num_shards).tolist()
    return [order[first : first + window_shards] for first in range(0, num_shards, window_shards)]


def document_order(windows: Sequence[Sequence[int]], shards: Sequence[range], seed: int) -> NDArray[np.int64]:
    """Returns the indices i64[documents] of all documents, window by window, shuffled within each window."""
    generator = np.random.default_rng([seed, DOCUMENT_ORDER])
    return np.concatenate(
        [generator.permutation(np.concatenate([shards[shard] for shard in window])) for window in windows]
    )


def released_windows(store_dir: Path, windows: Sequence[Sequence[int]]) -> int:
    """Returns the number of windows that training has released so far.

    Raises:
        UserError: training reads the shards in a different order, so both programs would wait forever.
    """
    path = store_dir / STREAM
    if not path.exists():
        return 0
    content = read_record_file(path)
    if content["windows"] != [list(window) for window in windows]:
        raise UserError(
            f"{path}: the shards of each window must be {windows[0]}, ..., but are {content['windows'][0]}, ... in "
            f"training; start both programs with the same seed and train.stream_shards, or delete {store_dir} to start "
            "again"
        )
    return int(content["released_windows"])


def delete_shards(store_dir: Path, windows: Sequence[Sequence[int]]) -> None:
    """Deletes the shards of these windows, each after its record, so that no record exists without its shard."""
    for shard in chain.from_iterable(windows):
        path = shard_path(store_dir, shard)
        record_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def missing_open_shards(store_dir: Path, windows: Sequence[Sequence[int]]) -> list[int] | None:
    """Returns the shards that extraction has to write now, or None once training has released every window."""
    while True:
        released = released_windows(store_dir, windows)
        if released >= len(windows):
            return None
        shards = chain.from_iterable(windows[released : released + OPEN_WINDOWS])
        missing = [shard for shard in shards if read_record(store_dir, shard) is None]
        # If training has just released more windows, their shards are missing on purpose, so look again.
        if released_windows(store_dir, windows) == released:
            return missing


def wait_until(is_done: Callable[[], bool], waiting_for: str) -> None:
    """Waits until `is_done()` is true, and prints what it is waiting for if that takes more than `REPORT_AFTER_S`."""
    started, is_reported = time.monotonic(), False
    while not is_done():
        if not is_reported and time.monotonic() - started > REPORT_AFTER_S:
            tqdm.write(f"waiting for {waiting_for}")
            is_reported = True
        time.sleep(POLL_S)


class StreamedStore(HiddenStore):
    """A store whose shards are written and deleted while it is read.

    Document lengths and loss masks come from the prompts.
    """

    def __init__(
        self,
        directory: Path,
        identity: StoreIdentity,
        documents: Documents,
        shard_tokens: int,
        window_shards: int,
        seed: int,
    ) -> None:
        """Describe a store without reading the disk; `open_stream` checks the files.

        Args:
            directory: the store's folder.
            identity: the target, prompts and captured layers that the states belong to.
            documents: the prompts that the states are extracted from.
            shard_tokens: as in `shard_ranges`.
            window_shards: `train.stream_shards`.
            seed: the run's seed.
        """
        self.documents = documents
        self.ranges = shard_ranges(documents.lengths, shard_tokens)
        self.windows = shard_windows(len(self.ranges), window_shards, seed)
        self.order = document_order(self.windows, self.ranges, seed)
        num_tokens, num_supervised = len(documents.input_ids), int(documents.loss_mask.sum())
        counts = (len(documents), num_tokens, num_supervised)
        super().__init__(directory, StoreManifest(SCHEMA_VERSION, identity, shard_tokens, 0, *counts, shards=()))
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

    def shards_of(self, documents: Sequence[int]) -> list[int]:
        """Returns the shards that hold these documents."""
        shards: list[int] = np.unique(np.searchsorted(self._first_documents, documents, side="right") - 1).tolist()
        return shards

    def _record(self, index: int) -> ShardRecord:
        """Waits until extraction has finished a shard, and returns its record."""
        if index not in self._records:
            path = shard_path(self.directory, index)
            wait_until(
                lambda: self._is_closed or record_path(path).exists(),
                f"{path.name} from mtptrain hidden-states, which must run with the same settings",
            )
            record = read_record(self.directory, index)
            if record is None:
                raise UserError(
                    f"{path}: must stay until training releases it, but does not exist; run both programs again"
                )
            self._records[index] = record
        return self._records[index]

    def close(self) -> None:
        """Unmap all shards and stop waiting for new ones, so that a prefetching thread can end."""
        self._is_closed = True
        super().close()

    def forget(self, windows: Sequence[Sequence[int]]) -> None:
        """Unmaps the shards of these windows: a deleted file takes up disk space until no process maps it."""
        for shard in chain.from_iterable(windows):
            self._mapped.pop(shard, None)
            self._records.pop(shard, None)


def open_stream(
    directory: Path, expected: StoreIdentity, documents: Documents, shard_tokens: int, window_shards: int, seed: int
) -> StreamedStore:
    """Wait until extraction has created the store, and open it for reading while extraction fills it.

    Raises:
        UserError: the store is finished, or was made with other settings.
    """
    if (directory / MANIFEST).exists():
        raise UserError(
            f"train.stream: must be false if the hidden states are finished, but is true and {directory / MANIFEST} "
            "exists; set train.stream=false to train on all of them, or choose another run_dir"
        )
    wait_until(
        (directory / PLAN).exists,
        f"{directory / PLAN} from mtptrain hidden-states, which must run with the same settings",
    )
    plan = read_record_file(directory / PLAN)
    identity = identity_from_json(plan["identity"])
    refuse_other(directory / PLAN, expected, identity, shard_tokens, plan["shard_tokens"])
    return StreamedStore(directory, expected, documents, shard_tokens, window_shards, seed)


class Releases:
    """Releases the windows of a store once no later step reads them."""

    def __init__(self, store: StreamedStore, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Find the first and the last step that read each window.

        Args:
            store: the store that the steps read.
            steps: the document indices of every micro-batch of every step.

        Raises:
            UserError: the steps need more than `OPEN_WINDOWS` windows on disk at once.
        """
        self.store = store
        self._steps = steps
        window_of = _window_of_documents(store)
        first, last = np.full(len(store.windows), len(steps)), np.zeros(len(store.windows), np.int64)
        for step, micro_batches in enumerate(steps):
            read = np.unique(window_of[list(chain.from_iterable(micro_batches))])
            first[read] = np.minimum(first[read], step)
            last[read] = step + 1
        # For each window, the number of steps after which neither it nor an earlier one is read again.
        self._unread_after = np.maximum.accumulate(last)
        if (self._unread_after[:-OPEN_WINDOWS] > first[OPEN_WINDOWS:]).any():
            raise UserError(
                f"train.stream_shards: {OPEN_WINDOWS} windows must hold all documents of a step, but windows "
                f"of {len(store.windows[0])} shards are too small; raise train.stream_shards or "
                "hidden_states.shard_tokens"
            )

    def is_written(self, step: int) -> bool:
        """Returns whether extraction has finished every shard that step `step` (from 0) reads."""
        shards = self.store.shards_of(list(chain.from_iterable(self._steps[step])))
        return all(record_path(shard_path(self.store.directory, shard)).exists() for shard in shards)

    def wait_for(self, step: int, ranks: Ranks, stop: StopSignal) -> signal.Signals | None:
        """Wait for the shards that step `step` (from 0) reads. Return early with the signal if a rank received one.

        All ranks wait here together, so that they can agree on a signal. They could not if each waited inside its own
        step.
        """
        stopped_by: signal.Signals | None = None

        def is_over() -> bool:
            nonlocal stopped_by
            if all(ranks.gather(self.is_written(step))):
                return True
            stopped_by = stop.agreed()
            return stopped_by is not None

        wait_until(
            is_over,
            f"the shards of step {step + 1} from mtptrain hidden-states, which must run with the same settings",
        )
        return stopped_by

    def num_unread(self, step: int) -> int:
        """Returns the number of windows, counted from the first, that no step after the first `step` steps reads."""
        return int(np.searchsorted(self._unread_after, step, side="right"))

    def is_due(self, step: int) -> bool:
        """Returns whether step `step` (from 1) is the last to read a window, so that a checkpoint frees disk space."""
        return self.num_unread(step) > self.num_unread(step - 1)

    def release(self, step: int, is_last: bool, is_first_rank: bool) -> None:
        """Deletes the shards that no step after a checkpoint at `step` reads, or all shards after the last step.

        A run that resumes from an earlier step lowers the number of released windows. Extraction then writes the
        shards of the reopened windows again.
        """
        count = len(self.store.windows) if is_last else self.num_unread(step)
        self.store.forget(self.store.windows[:count])
        if is_first_rank:
            write_sealed(self.store.directory / STREAM, {"released_windows": count, "windows": self.store.windows})
            delete_shards(self.store.directory, self.store.windows[:count])


def _window_of_documents(store: StreamedStore) -> NDArray[np.int64]:
    """Returns the index of each document's window i64[documents]."""
    windows = np.empty(store.num_documents, np.int64)
    for number, window in enumerate(store.windows):
        for shard in window:
            windows[store.ranges[shard].start : store.ranges[shard].stop] = number
    return windows
