"""Counts the memory and FLOPs of operators, on real or fake tensors."""

import weakref
from collections import Counter
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FLASH_OF_CPUS = frozenset(
    ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
)
ATTENTION = FLASH_OF_CPUS | {"_flash_attention_forward", "_flash_attention_backward"}


class Meter(TorchDispatchMode):
    """Counts the operators that are dispatched inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = Counter[str]()
        """Peak memory of operator outputs, tensors passed to `hold` and flash attention's scratch, by device."""
        self.matmul_flops = 0
        self.attention_flops = 0
        self.alive_bytes = Counter[str]()
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # in inference mode, `linear`, `matmul` etc. arrive undecomposed
            with self:
                return func.decompose(*args, **kwargs)
        name = func._overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.observe(name, args, kwargs, inputs)
        if name == "_flash_attention_backward":
            self._count_peak(str(args[1].device), flash_scratch_bytes(args))
        # Segment offsets are real tensors, because `attention_flops` reads their values. Multiplying them in fake mode
        # would lose these.
        scales_offsets = name == "mul" and not any(isinstance(x, FakeTensor) for x in inputs)
        with unset_fake_temporarily() if scales_offsets else nullcontext():
            out = func(*args, **kwargs)
        if name in ATTENTION:
            self.attention_flops += attention_flops(name, args)
        elif func._overloadpacket in flop_registry:
            self.matmul_flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        self.hold(*(x for x in tree_leaves(out) if isinstance(x, torch.Tensor)))
        return out

    def observe(self, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        """Called before every operator. Subclasses count more here."""

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count the memory of tensors until it is freed, without keeping them alive."""
        for tensor in tensors:
            storage, device = tensor.untyped_storage(), str(tensor.device)
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._alive:
                self._alive.add(key)
                self.alive_bytes[device] += num_bytes
                self._count_peak(device)
                weakref.finalize(storage, self._release, key, device, num_bytes)

    def _count_peak(self, device: str, scratch_bytes: int = 0) -> None:
        self.peak_bytes[device] = max(self.peak_bytes[device], self.alive_bytes[device] + scratch_bytes)

    def _release(self, key: int, device: str, num_bytes: int) -> None:
        self._alive.discard(key)
        self.alive_bytes[device] -= num_bytes


@cache
def _is_composite(func: Any) -> bool:
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func.namespace == "aten"
        and func._overloadpacket not in flop_registry
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit)
    )


def attention_flops(name: str, args: Any) -> int:
    """Returns the FLOPs of a flash kernel.

    Each pair of a query and a visible key costs two dot products in the forward pass and five in the backward pass. If
    the segment offsets are fake tensors, all segments are assumed to be as long as the longest one.
    """
    products = 5 if "backward" in name else 2
    query, key = args[:2] if products == 2 else args[1:3]
    if name in FLASH_OF_CPUS:  # [B, heads, S, head_dim]
        is_causal = any(args[4:5] if products == 2 else args[7:8])  # absent if it has its default
        return products * query.numel() * key.shape[2] * 2 // (2 if is_causal else 1)
    offsets, longest, is_causal = (
        (args[3:5], args[5:7], args[8]) if products == 2 else (args[6:8], args[8:10], args[11])
    )
    pairs = sum(
        q * k / 2 if is_causal else q * k
        for q, k in zip(*(_lengths(*x) for x in zip(offsets, longest, strict=True)), strict=True)
    )
    return int(products * 2 * query.shape[1] * query.shape[2] * pairs)


def flash_scratch_bytes(args: Any) -> int:
    """Returns the bytes that flash attention's backward pass allocates, including scratch hidden from the dispatcher.

    The scratch is the query's gradient in fp32 and one sum per row, both padded by 128 rows per segment. With fewer key
    heads than query heads, it also holds gradients of keys and values for each query head. Source: `mha_varlen_bwd` in
    FlashAttention 2.
    """
    query, key, offsets = args[1], args[2], args[6]
    num_heads, head_dim = query.shape[1:]
    padded_rows = query.shape[0] + 128 * (len(offsets) - 1)
    grads_per_query_head = (
        2 * key.shape[0] * num_heads * head_dim * key.element_size() if key.shape[1] != num_heads else 0
    )
    # The results are allocated while the scratch is still alive.
    results = num_bytes_of(query) + 2 * num_bytes_of(key)
    return int(padded_rows * num_heads * (-(-head_dim // 32) * 32 + 1) * 4 + grads_per_query_head + results)


def _lengths(offsets: torch.Tensor, longest: int) -> list[int]:
    if isinstance(offsets, FakeTensor):
        return [longest] * (len(offsets) - 1)
    with unset_fake_temporarily():
        return offsets.diff().tolist()


def num_bytes_of(x: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes. Expanded dimensions count once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count
