"""CUDA devices without a GPU: within `fake_cuda()` new tensors have a device, a shape and a dtype, but no data."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cuda import guard, meter

__all__ = ["H100", "Meter", "fake_cuda", "place"]

SYNCING = frozenset(
    (
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "bincount",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )
)
"""Operators that make the host read their result or its shape."""
MASKED = frozenset(("index", "index_put", "index_put_"))
"""Operators that make the host read the shape of their result if an index is a boolean mask."""
NUM_DEVICES = 8
H100 = SimpleNamespace(
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "gcnArchName": "", "total_memory": 85 * 10**9},
    **{"multi_processor_count": 132, "warp_size": 32, "max_threads_per_multi_processor": 2048},
    **{"max_threads_per_block": 1024, "regs_per_multiprocessor": 65536, "shared_memory_per_block": 49152},
    **{"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472},
    **{"L2_cache_size": 50 * 2**20, "clock_rate": 1980000, "memory_clock_rate": 2619000, "memory_bus_width": 5120},
)
"""What torch.cuda.get_device_properties says within `fake_cuda()`."""


class Meter(meter.Meter):
    """Also counts calls, and the times that the host waits for a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = Counter[str]()
        self.syncs = Counter[str]()
        """Number of times that the host waits, by operator and calling line."""

    def observe(self, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        self.num_calls[name] += 1
        if _waits(name, args, kwargs, inputs):  # checked before the call, which raises for fake tensors
            self.syncs[f"{name} at {_caller()}"] += 1


def _waits(name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
    """Returns whether the host waits for a CUDA device: for a value, a shape, or a copy that is not `non_blocking`."""
    devices = {x.device.type for x in inputs}
    if name in ("_to_copy", "copy_"):
        is_free = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
        return "cuda" in devices and len(devices) > 1 and not is_free
    if "cuda" not in devices:
        return False
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in SYNCING or (name in MASKED and any(x is not None and x.dtype == torch.bool for x in args[1]))


def _caller() -> str:
    inside = ("/torch/", __file__, meter.__file__)
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in inside)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


class FakeEvent:
    """An event that is always complete. `PhaseClock` records events around each phase."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1.0

    def synchronize(self) -> None:
        raise RuntimeError("the host must not wait for the device, but code under fake_cuda() synchronized an event")


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Make new tensors fake, with eight CUDA devices to put them on; skips the test where that cannot be done.

    CPU tensors created earlier keep their data. One operator may take such tensors together with fake ones.
    """
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")
    answers = {
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: H100.name,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "Event": FakeEvent,
    }
    with ExitStack() as stack:
        stack.callback(guard.LIBRARY.fake_cuda_switch, False)
        guard.LIBRARY.fake_cuda_switch(True)
        stack.enter_context(patch.multiple(torch.cuda, **answers))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def place(
    module: nn.Module, device: str | dict[str, str] = "cuda:0", dtype: torch.dtype | None = torch.bfloat16
) -> nn.Module:
    """Replace the weights of a module with fake ones on `device`, which may be a dict from prefixes of module names to
    devices; the longest prefix decides.

    `Module.to` moves data and cannot be used; buffers keep their dtype, and so do weights where `dtype` is None.
    """
    for name, part in module.named_modules():
        where = device if isinstance(device, str) else _device_of(name, device)
        for key, weight in part._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=where)
                part._parameters[key] = nn.Parameter(empty, requires_grad=weight.requires_grad)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=where)
    return module


def _device_of(name: str, devices: dict[str, str]) -> str:
    prefixes = [prefix for prefix in devices if name == prefix or name.startswith(f"{prefix}.")]
    return devices[max(prefixes, key=len)] if prefixes else "cuda:0"
