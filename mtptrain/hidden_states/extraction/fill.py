"""Fills shards with the states of a backend: the main loop of stage 2.

One or more threads check, encode and write documents while later ones are computed. Another thread hashes and syncs
full shards.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.config import StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.writer import ShardFile
from mtptrain.utils.errors import FULL_DISK
from mtptrain.utils.progress import ProgressBar

MAX_PENDING_BYTES = 2**30
"""Maximum size in bytes of the states that wait to be written, or one document. Then `OverlappedWriter` waits."""


class Streams(Protocol):
    """A backend that runs the target and returns its residual streams."""

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """Yields an iterator for each shard in order.

        A shard's iterator yields, in any order, the index of each prompt in the shard and its states [n, L + 1, H]: the
        captured layers, then the state before the final norm. The caller must exhaust one iterator before it requests
        the next.
        """


WRITER_THREADS = 4
"""Number of CPU threads per rank that check, encode and write states while later ones are computed."""


class OverlappedWriter:
    """Writes documents to one shard after another. An error in a thread is raised later, at the latest at the end."""

    def __init__(self, num_threads: int = WRITER_THREADS) -> None:
        """Start threads that write so many documents at a time. The bytes on disk do not depend on their number."""
        self._writing = ThreadPoolExecutor(num_threads)
        self._finishing = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0
        self._finish_in_progress: Future[None] | None = None
        self._unfinished: set[ShardFile] = set()
        self._thread_local = threading.local()

    def write_shard(self, file: ShardFile, documents: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Queue the states [n, L + 1, H] of a shard's documents, on any device, whose computation has finished."""
        self._unfinished.add(file)
        for document, states in documents:
            num_bytes = states.numel() * states.element_size()
            while self._pending and (self._pending[0][0].done() or self._pending_bytes + num_bytes > MAX_PENDING_BYTES):
                self._wait_for_first()
            self._pending.append((self._writing.submit(self._write, file, document, states), num_bytes))
            self._pending_bytes += num_bytes
        if self._finish_in_progress:
            self._finish_in_progress.result()
        pending = [future for future, _ in self._pending]
        self._finish_in_progress = self._finishing.submit(self._finish, file, pending)

    def _wait_for_first(self) -> None:
        future, num_bytes = self._pending.popleft()
        self._pending_bytes -= num_bytes
        future.result()

    def _write(self, file: ShardFile, document: int, states: torch.Tensor) -> None:
        if not states.is_cuda:
            return file.write(document, states)
        if not hasattr(self._thread_local, "stream"):
            self._thread_local.stream = torch.cuda.Stream(states.device)
        with torch.cuda.stream(self._thread_local.stream):  # overlaps with the kernels of the next batch
            return file.write(document, states)

    def _finish(self, file: ShardFile, pending: list[Future[None]]) -> None:
        for future in pending:
            future.result()
        file.finish()
        self._unfinished.discard(file)

    def __enter__(self) -> "OverlappedWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                while self._pending:
                    self._wait_for_first()
                if self._finish_in_progress:
                    self._finish_in_progress.result()
        finally:
            self._writing.shutdown(wait=True, cancel_futures=True)
            self._finishing.shutdown(wait=True, cancel_futures=True)
            for file in self._unfinished:
                file.discard()


def num_tokens(documents: Documents, shards: list[range]) -> int:
    return sum(
        int(documents.document_offsets[shard.stop] - documents.document_offsets[shard.start]) for shard in shards
    )


def fill_shards(
    streams: Streams,
    documents: Documents,
    shards: dict[int, range],
    store_dir: Path,
    hidden_size: int,
    num_captured: int,
    dtype: StoreDtype,
    progress_name: str,
    show: bool = True,
) -> None:
    """Write the documents of `shards`, by their indices, into a store of `begin_store`. L is `num_captured`."""
    total = num_tokens(documents, list(shards.values()))
    prompts = ([documents.token_ids(i) for i in shard] for shard in shards.values())
    try:
        with (
            OverlappedWriter() as writer,
            ProgressBar(
                total=total, unit="tok", unit_scale=True, desc=f"hidden states, {progress_name}", disable=not show
            ) as bar,
        ):
            for (index, shard), shard_states in zip(shards.items(), streams.extract(prompts), strict=True):
                file = ShardFile(store_dir, index, tokens_of_shard(documents, shard), hidden_size, num_captured, dtype)
                writer.write_shard(file, counted(shard_states, bar))
    except OSError as error:
        is_elsewhere = error.filename is not None and not Path(error.filename).is_relative_to(store_dir)
        if error.errno not in FULL_DISK or is_elsewhere:
            raise  # the backend's own error says it all, such as that the disk of hidden_states.scratch_dir is full
        raise OSError(
            error.errno,
            f"the disk must have room for {bytes_per_token(hidden_size, num_captured, dtype) * total / 1e9:.3f} GB of "
            "hidden states from this process, but is full; finished shards are kept",
            str(store_dir),
        ) from error


def counted(states: Iterator[tuple[int, torch.Tensor]], bar: ProgressBar) -> Iterator[tuple[int, torch.Tensor]]:
    for document, each in states:
        yield document, each
        bar.update(len(each))


def tokens_of_shard(documents: Documents, shard: range) -> dict[str, torch.Tensor]:
    """Returns the tensors of a shard that come from the prompts, by their names in the format."""
    offsets = documents.document_offsets[shard.start : shard.stop + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    return {
        "input_ids": torch.tensor(documents.input_ids[tokens]),
        "loss_mask": torch.tensor(documents.loss_mask[tokens]),
        "document_offsets": torch.tensor(offsets - offsets[0]),
        "document_ids": torch.tensor(documents.document_ids[shard.start : shard.stop]),
    }
