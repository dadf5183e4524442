"""CUDA devices without a GPU: within `fake_cuda()` new tensors have a device, a shape and a dtype, but no data."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cuda import guard

NUM_DEVICES = 8
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85 * 10**9)
"""What torch.cuda.get_device_properties says within `fake_cuda()`."""


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


def place(module: nn.Module, device: str) -> nn.Module:
    """Replace the weights of a module with fake ones in bf16 on a device, and its buffers with fake ones.

    `Module.to` moves data and cannot be used.
    """
    for part in module.modules():
        for key, weight in part._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
                part._parameters[key] = nn.Parameter(empty, requires_grad=weight.requires_grad)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return module
