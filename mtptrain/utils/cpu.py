"""The matrix instructions of this CPU, and settings of the C library's memory allocator."""

import ctypes

import torch

HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether this CPU has matrix instructions for bf16 (AMX tiles)."""


def keep_freed_memory() -> None:
    """Make the C library reuse freed memory for large tensors instead of returning it to the system.

    Otherwise every step faults in new pages, which costs up to a fifth of its time on a CPU. Does nothing without
    glibc.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # from malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25)  # the maximum of older glibc versions
        mallopt(m_trim_threshold, 2**31 - 1)
