"""Writes shards in threads while the next states are computed.

One or more threads check, encode and write documents. Another thread hashes and syncs full shards.
"""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mtptrain.hidden_states.writer import ShardFile

MAX_PENDING_BYTES = 2**30
"""Maximum size in bytes of the states that wait to be written. `OverlappedWriter.write` blocks until there is room.

A document with more bytes than this has room when no other waits."""


class OverlappedWriter:
    """Writes documents to one shard after another.

    An error in a thread is raised by a later call or at the end of the context.
    """

    def __init__(self, num_threads: int = 1) -> None:
        """Start threads that write so many documents at a time. The bytes on disk do not depend on their number."""
        self._writing = ThreadPoolExecutor(num_threads)
        self._finishing = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0
        self._finish_in_progress: Future[None] | None = None
        self._file: ShardFile | None = None
        self._unfinished: set[ShardFile] = set()
        self._thread_local = threading.local()

    def begin(self, file: ShardFile) -> None:
        """Start a shard. `write` adds documents to it until `finish`."""
        self._file = file
        self._unfinished.add(file)

    def write(self, document: int, states: torch.Tensor) -> None:
        """Queue the states [n, L + 1, H], on any device, of the document at index `document` in the shard.

        The computation of the states must have finished.
        """
        assert self._file is not None, "no shard was begun"
        num_bytes = states.numel() * states.element_size()
        while self._pending and (self._pending[0][0].done() or self._pending_bytes + num_bytes > MAX_PENDING_BYTES):
            self._wait_for_first()
        self._pending.append((self._writing.submit(self._write, self._file, document, states), num_bytes))
        self._pending_bytes += num_bytes

    def finish(self) -> None:
        """Finalize the current shard in the background while the next one is written.

        At most one shard is finalized at a time.
        """
        assert self._file is not None, "no shard was begun"
        if self._finish_in_progress:
            self._finish_in_progress.result()
        pending = [future for future, _ in self._pending]
        self._finish_in_progress = self._finishing.submit(self._finish, self._file, pending)
        self._file = None

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
