"""Counts what operators do, on tensors with or without data: memory, FLOPs, bytes moved, and waits of the host for the device."""

import traceback
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

WAITING = frozenset(
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
"""Operators whose result, or its shape, the host must read."""
MASKED = frozenset(("index", "index_put", "index_put_"))
"""Operators that do so where an index is a mask."""
WRITING = frozenset(("fill", "fill_", "zero_", "zeros_like", "full_like", "ones_like", "zeros", "full", "ones", "arange"))
"""Operators that read no tensor of their result's size."""
PART_READING = frozenset(("index", "index_select", "gather", "embedding"))
"""Operators that read as much of their first tensor as they write."""


class Meter(TorchDispatchMode):
    """Counts the operators that are dispatched while it is entered.

    An operator reads its inputs from memory and writes its outputs there once, as eager kernels do. Views and `empty` move nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = Counter[str]()
        """The most that is alive at once on each device, of what operators made and what was passed to `hold`."""
        self.matmul_flops = 0
        self.matmul_bytes = 0
        self.attention_bytes = 0
        self.elementwise_bytes = 0
        """Bytes moved by operators that are neither matrix products nor flash attention."""
        self.bytes_of = Counter[str]()
        """The same by the operator's name."""
        self.num_calls = Counter[str]()
        self.syncs = Counter[str]()
        """Waits of the host for a CUDA device, by operator and line of the code that calls it."""
        self._alive_bytes = Counter[str]()
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._overloadpacket not in flop_registry:
            with self:  # what inference mode hands over whole: `linear`, `matmul` and the like
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        name = func._overloadpacket.__name__
        self.num_calls[name] += 1
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if _waits(name, args, kwargs, inputs):  # asked before the call, for a tensor without data raises there
            self.syncs[f"{name} at {_caller()}"] += 1
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if func.namespace == "aten":
            self._count(func, name, args, kwargs, inputs, outputs, out)
        self.hold(*outputs)
        return out

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count the memory of tensors for as long as something else keeps them."""
        for tensor in tensors:
            storage, device = tensor.untyped_storage(), str(tensor.device)
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._alive:
                self._alive.add(key)
                self._alive_bytes[device] += num_bytes
                self.peak_bytes[device] = max(self.peak_bytes[device], self._alive_bytes[device])
                weakref.finalize(storage, self._release, key, device, num_bytes)

    def _release(self, key: int, device: str, num_bytes: int) -> None:
        self._alive.discard(key)
        self._alive_bytes[device] -= num_bytes

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, inputs: Any, outputs: Any, out: Any) -> None:
        if func.is_view or not outputs or name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh")):
            return
        num_bytes = _moved(name, inputs, outputs)
        if "attention" in name:
            self.attention_bytes += num_bytes
        elif func._overloadpacket in flop_registry:
            self.matmul_flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.matmul_bytes += num_bytes
        else:
            self.elementwise_bytes += num_bytes
            self.bytes_of[name] += num_bytes


def _moved(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    written = sum(map(num_bytes_of, outputs))
    if name in WRITING:
        return written
    if name == "copy_":
        return num_bytes_of(inputs[1]) + written
    if name in PART_READING:
        return 2 * written + sum(map(num_bytes_of, inputs[1:]))
    if name in ("index_put_", "index_put"):
        return sum(map(num_bytes_of, inputs[1:])) + num_bytes_of(inputs[-1])
    return sum(map(num_bytes_of, inputs)) + written


def num_bytes_of(x: torch.Tensor) -> int:
    """Bytes of a tensor; what is expanded is there once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count


def _waits(name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether the host waits for a CUDA device: to read a value or a shape, or for a copy that is not asked to go on by itself."""
    devices = {x.device.type for x in inputs}
    if name in ("_to_copy", "copy_"):
        is_free = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
        return "cuda" in devices and len(devices) > 1 and not is_free
    if "cuda" not in devices:
        return False
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAITING or (name in MASKED and any(x is not None and x.dtype == torch.bool for x in args[1]))


def _caller() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename and frame.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
