"""The matrix instructions of this CPU, and settings of the C library's memory allocator."""

import ctypes
import os
import platform
import re
import sys
from pathlib import Path

from mtptrain.utils.errors import UserError

PRETENDED_BF16 = "MTPTRAIN_CPU_BF16"
"""Environment variable with which tests run both paths on any CPU: `0` pretends that bf16 instructions are missing, `1`
that there are some."""

_AVX512 = {"avx512bw", "avx512vl", "avx512dq"}
"""Instructions with which torch multiplies bf16 matrices on a CPU of this kind, even without those for bf16 itself."""


def has_bf16_instructions() -> bool:
    """Returns whether torch multiplies bf16 matrices on this CPU with instructions that make them fast.

    Without them, torch falls back to loops that reach 0.3 to 8 GFLOP/s, where fp32 reaches 23 to 86 (one core).
    """
    pretended = os.environ.get(PRETENDED_BF16)
    if pretended not in (None, "0", "1"):
        raise UserError(f"{PRETENDED_BF16}: must be 0, 1 or unset, but is {pretended!r}; unset it")
    if pretended is not None:
        return pretended == "1"
    flags = None if "torch" in sys.modules else _flags()
    if flags is not None and "avx_ne_convert" not in flags:  # with these, torch's answer depends on how it was built
        return flags >= _AVX512
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_amx() -> bool:
    return "amx_tile" in (_flags() or ())


def _flags() -> set[str] | None:
    """Returns the instructions of this CPU as Linux names them; None on other systems and other kinds of CPU."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


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
