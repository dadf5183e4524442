"""Elementwise work fused by torch.compile, where the trainer asks for it; the same functions run plainly everywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")

RECOMPUTE = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}
"""Options of Inductor with which it computes a value again wherever it is read, rather than write it to memory."""

_is_on = False
_through: Callable[..., Any] | None = None


def fuse(on: bool) -> None:
    """Run `fused` functions compiled from now on, or plainly."""
    global _is_on
    _is_on = on


@contextmanager
def fused_through(call: Callable[..., Any]) -> Iterator[None]:
    """Within, `fused` functions are run by `call(function, *args)`, which may count what a compiler would make of them."""
    global _through
    _through = call
    try:
        yield
    finally:
        _through = None


def uses_gpu_kernels(x: torch.Tensor) -> bool:
    """Returns whether work on x is done the way of a GPU. A bf16 tensor without data belongs to a plan for GPUs, whatever its device."""
    return x.is_cuda or (isinstance(x, FakeTensor) and x.dtype == torch.bfloat16)


def mark_static(x: torch.Tensor) -> torch.Tensor:
    """The same, whose sizes are constants of the functions that are compiled for it, as those of a module's weights are."""
    if _is_on:
        torch._dynamo.mark_static(x)
    return x


def mark_width_static(x: torch.Tensor) -> torch.Tensor:
    """Returns x, whose last size is a constant of the functions that are compiled for it on a GPU.

    Inductor finds the largest value and the sum of exponentials in one pass over a row only where it knows the row's length.
    """
    if _is_on and x.is_cuda:
        torch._dynamo.mark_static(x, x.dim() - 1)
    return x


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of tensors without side effects; results differ by rounding at most."""
    return _fused(function, gpu_options=None)


def fused_by_recomputing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate as `fused` does; on a GPU, what memory traffic bounds computes values again rather than write them."""
    return _fused(function, gpu_options=RECOMPUTE)


def _fused(function: Callable[P, R], gpu_options: dict[str, Any] | None) -> Callable[P, R]:
    @cache
    def compiled(options: tuple[tuple[str, Any], ...]) -> Callable[P, R]:
        """Is not called at import: torch.compile loads its compiler, which takes seconds."""
        return torch.compile(function, dynamic=True, options=dict(options) or None)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _through is not None:
            result: R = _through(function, *args, **kwargs)
            return result
        if not _is_on:
            return function(*args, **kwargs)
        is_on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return compiled(tuple(gpu_options.items()) if gpu_options and is_on_gpu else ())(*args, **kwargs)

    return call
