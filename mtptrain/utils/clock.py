"""Measures the time of each phase of a program."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Accumulates seconds per phase until they are read. On a GPU it records events, so only `read` synchronizes."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds
