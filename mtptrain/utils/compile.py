"""Provides decorators for functions that torch.compile fuses while compilation is on (see `set_compilation`).

The switch is a module variable: these functions are called deep inside autograd functions, some of them on autograd's
own threads, which a context variable would not reach.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

RECOMPUTE: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}
"""Options that make Inductor recompute a value wherever it is read instead of writing it to memory."""

_is_on = False


def set_compilation(on: bool) -> None:
    global _is_on
    _is_on = on


@contextmanager
def eager() -> Iterator[None]:
    """Run `fused` functions eagerly inside this context, for example because the shapes change with every call."""
    before = _is_on
    set_compilation(False)
    try:
        yield
    finally:
        set_compilation(before)


def uses_gpu_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda


def mark_width_static(x: torch.Tensor) -> torch.Tensor:
    """Mark the last dimension of x as static for functions compiled for a GPU, and return x.

    Inductor computes the maximum and the sum of exponentials of a row in one pass only if it knows the row's length.
    """
    if _is_on and x.is_cuda:
        torch._dynamo.mark_static(x, x.dim() - 1)
    return x


def fused(function: Callable[P, R], recomputes: bool = False) -> Callable[P, R]:
    """Decorate a pure function of tensors. On a GPU, `recomputes` computes values again instead of storing them."""

    @cache
    def compiled(recomputing: bool) -> Callable[P, R]:
        """Compile on first use: loading the compiler takes seconds, too long for an import."""
        return torch.compile(function, dynamic=True, options=RECOMPUTE if recomputing else None)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_on:
            return function(*args, **kwargs)
        is_on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return compiled(recomputes and is_on_gpu)(*args, **kwargs)

    return call
