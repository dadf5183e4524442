"""Shards written while the next states are computed: some threads check, encode and write, another syncs and hashes what is full."""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mtptrain.hidden_states.writer import ShardFile

MAX_PENDING_BYTES = 2**30
"""States that wait to be written; the next one then waits for the first of them."""


class OverlappedWriter:
    """Writes documents to one shard after the other. An error of a thread is raised by the next call, or at the end."""

    def __init__(self, num_threads: int = 1) -> None:
        """Start without a shard.

        Args:
            num_threads: documents that are written at a time. The bytes on the disk are the same for any number.
        """
        self._writing = ThreadPoolExecutor(num_threads)
        self._finishing = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0
        self._finished: Future[None] | None = None
        self._file: ShardFile | None = None
        self._unfinished: set[ShardFile] = set()
        self._of_thread = threading.local()

    def begin(self, file: ShardFile) -> None:
        """Write to this shard from now on."""
        self._file = file
        self._unfinished.add(file)

    def write(self, document: int, states: torch.Tensor) -> None:
        """Hand over the states of a document [n, L + 1, H], complete, on any device."""
        assert self._file is not None, "no shard was begun"
        num_bytes = states.numel() * states.element_size()
        while self._pending and (self._pending[0][0].done() or self._pending_bytes + num_bytes > MAX_PENDING_BYTES):
            self._wait_for_first()
        self._pending.append((self._writing.submit(self._write, self._file, document, states), num_bytes))
        self._pending_bytes += num_bytes

    def finish(self) -> None:
        """The shard has all of its documents: it is completed behind the next one's back, no more than one at a time."""
        assert self._file is not None, "no shard was begun"
        if self._finished:
            self._finished.result()
        pending = [future for future, _ in self._pending]
        self._finished = self._finishing.submit(self._finish, self._file, pending)
        self._file = None

    def _wait_for_first(self) -> None:
        future, num_bytes = self._pending.popleft()
        self._pending_bytes -= num_bytes
        future.result()

    def _write(self, file: ShardFile, document: int, states: torch.Tensor) -> None:
        if not states.is_cuda:
            return file.write(document, states)
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(states.device)
        with torch.cuda.stream(self._of_thread.stream):  # beside the kernels of the next batch
            return file.write(document, states)

    def _finish(self, file: ShardFile, pending: list[Future[None]]) -> None:
        for future in pending:
            future.result()
        file.finish()
        self._unfinished.discard(file)

    def __enter__(self) -> "OverlappedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                while self._pending:
                    self._wait_for_first()
                if self._finished:
                    self._finished.result()
        finally:
            self._writing.shutdown(wait=True, cancel_futures=True)
            self._finishing.shutdown(wait=True, cancel_futures=True)
            for file in self._unfinished:
                file.discard()
