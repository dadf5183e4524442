"""Streaming: extraction and training run at the same time, on a store that holds only a few windows of shards.

The seed shuffles the shards, which are then divided into windows of `train.stream_shards` shards.
mtptrain hidden-states writes the shards of the first `OPEN_WINDOWS` windows that training has not released.
mtptrain train waits for the shards that its next step reads. After a checkpoint, it releases the windows that no later
step reads and deletes their shards. The two programs communicate only through files in the store's folder:
`stream.json` holds the windows and the number of released ones.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtptrain.data.identity import StoreIdentity, refuse_other
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.store import MANIFEST, PLAN, HiddenStates, ShardRecord, StorePlan
from mtptrain.hidden_states.writer import read_record, record_path, shard_path, shard_ranges
from mtptrain.utils.distributed import EXIT_STOPPED, Ranks, StopSignal
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256, read_manifest, write_sealed
from mtptrain.utils.progress import ProgressBar

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


@dataclass(frozen=True)
class StreamState:
    """The contents of `stream.json`."""

    released_windows: int
    """Number of leading windows that training has released."""
    windows: list[list[int]]
    """Shards of each window, in training order."""


def released_windows(store_dir: Path, windows: Sequence[Sequence[int]]) -> int:
    """Returns how many windows training has released; refuses another order of shards: both would wait forever."""
    path = store_dir / STREAM
    if not path.exists():
        return 0
    advice = "delete this file, and start both programs with the same seed and train.stream_shards"
    state = read_manifest(StreamState, path, "mtptrain train", advice)
    if state.windows != [list(window) for window in windows]:
        found = f"{state.windows[0]}, ..." if state.windows else "missing"
        raise UserError(
            f"{path}: the shards of each window must be {windows[0]}, ..., but are {found} in training; {advice}"
        )
    return state.released_windows


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


def wait_together(
    is_done: Callable[[], bool], ranks: Ranks, stop: StopSignal, waiting_for: str
) -> signal.Signals | None:
    """Wait on all ranks until `is_done()` is true on each. Returns early, on all, with a signal that one received."""
    started, is_silent = time.monotonic(), not ranks.is_first
    while not all(ranks.gather(is_done())):
        if (stopped_by := stop.agreed()) is not None:
            return stopped_by
        if not is_silent and time.monotonic() - started > REPORT_AFTER_S:
            message = f"waiting for {waiting_for} from mtptrain hidden-states, which must run with the same settings"
            ProgressBar.write(message, file=sys.stderr)  # stdout may be a file, and buffered
            is_silent = True
        time.sleep(POLL_S)
    return None


class StreamedStates(HiddenStates):
    """States whose shards are written and deleted while training reads them; all else comes from the prompts."""

    order: NDArray[np.int64]

    def __init__(self, directory: Path, documents: Documents, shard_tokens: int, window_shards: int, seed: int) -> None:
        """Describe the states of these prompts without reading the disk; `open` checks the files."""
        self.ranges = shard_ranges(documents.lengths, shard_tokens)
        super().__init__(directory, [len(documents_of_shard) for documents_of_shard in self.ranges])
        self.documents = documents
        self.windows = shard_windows(len(self.ranges), window_shards, seed)
        self.order = document_order(self.windows, self.ranges, seed)
        self._steps: Sequence[Sequence[Sequence[int]]] = ()
        self._finished_after = np.zeros(0, np.int64)
        self._records: dict[int, ShardRecord] = {}
        self._is_closed = False

    @staticmethod
    def open(
        directory: Path,
        expected: StoreIdentity,
        documents: Documents,
        shard_tokens: int,
        window_shards: int,
        seed: int,
        ranks: Ranks,
        stop: StopSignal,
    ) -> "StreamedStates":
        """Wait on all ranks until extraction has created the store, or end with a stop signal; then open the store."""
        if (directory / MANIFEST).exists():
            raise UserError(
                "train.stream: must be false if the hidden states are finished, but is true and "
                f"{directory / MANIFEST} exists; set train.stream=false to train on all of them, or choose another "
                "run_dir"
            )
        plan_path = directory / PLAN
        if wait_together(plan_path.exists, ranks, stop, str(plan_path)):
            sys.exit(EXIT_STOPPED)
        plan = StorePlan.read(directory)
        refuse_other(plan_path, expected, plan.identity, shard_tokens, plan.shard_tokens)
        return StreamedStates(directory, documents, shard_tokens, window_shards, seed)

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        return self.documents.lengths

    @property
    def document_ids(self) -> NDArray[np.int64]:
        return self.documents.document_ids

    def loss_masks(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        yield self.documents.loss_mask, self.documents.document_offsets

    def facts(self) -> dict[str, object]:
        return {
            "the sha256 of the hidden states' plan": file_sha256(self.directory / PLAN),
            "train.stream_shards": len(self.windows[0]),
        }

    def record(self, shard: int) -> ShardRecord:
        """Waits until extraction has finished a shard, and returns its record."""
        if shard not in self._records:
            path = shard_path(self.directory, shard)
            while not (self._is_closed or record_path(path).exists()):  # `wait_for` says what training waits for
                time.sleep(POLL_S)
            record = read_record(self.directory, shard)
            if record is None:
                raise UserError(
                    f"{path}: must stay until training releases it, but does not exist; run both programs again"
                )
            self._records[shard] = record
        return self._records[shard]

    def close(self) -> None:
        """Unmap all shards and stop waiting for new ones, so that a prefetching thread can end."""
        self._is_closed = True
        super().close()

    def set_steps(self, steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Set what each micro-batch of each step reads: at any time, from no more than `OPEN_WINDOWS` windows."""
        self._steps = steps
        window_of = {shard: number for number, window in enumerate(self.windows) for shard in window}
        first, ends = np.full(len(self.windows), len(steps)), np.zeros(len(self.windows), np.int64)
        for step, micro_batches in enumerate(steps):
            read = sorted({window_of[shard] for shard in self.shards_of(list(chain.from_iterable(micro_batches)))})
            first[read] = np.minimum(first[read], step)
            ends[read] = step + 1
        # For each window, the number of steps after which neither it nor an earlier one is read again.
        self._finished_after = np.maximum.accumulate(ends)
        if (self._finished_after[:-OPEN_WINDOWS] > first[OPEN_WINDOWS:]).any():
            raise UserError(
                f"train.stream_shards: {OPEN_WINDOWS} windows must hold all documents of a step, but windows "
                f"of {len(self.windows[0])} shards are too small; raise train.stream_shards or "
                "hidden_states.shard_tokens"
            )

    def wait_for(self, step: int, ranks: Ranks, stop: StopSignal) -> signal.Signals | None:
        """Wait for the shards that step `step` (from 0) reads. Return early with the signal if a rank received one."""
        shards = self.shards_of(list(chain.from_iterable(self._steps[step])))
        records = [record_path(shard_path(self.directory, shard)) for shard in shards]
        return wait_together(
            lambda: all(path.exists() for path in records), ranks, stop, f"the shards of step {step + 1}"
        )

    def frees_disk_after(self, step: int) -> bool:
        return self.num_finished_windows(step) > self.num_finished_windows(step - 1)

    def num_finished_windows(self, step: int) -> int:
        """Returns the number of leading windows that no step after the first `step` steps reads."""
        return int(np.searchsorted(self._finished_after, step, side="right"))

    def release(self, step: int, is_last: bool, is_first_rank: bool) -> None:
        """Deletes the shards that no step after a checkpoint at `step` reads, or all shards after the last step.

        A run that resumes from an earlier step lowers the number of released windows, and shards are written again.
        """
        count = len(self.windows) if is_last else self.num_finished_windows(step)
        for shard in chain.from_iterable(self.windows[:count]):
            self._mapped.pop(shard, None)
            self._records.pop(shard, None)
        if is_first_rank:
            write_sealed(self.directory / STREAM, asdict(StreamState(count, self.windows)))
            delete_shards(self.directory, [*self.windows[:count], *self.windows[count + OPEN_WINDOWS :]])
