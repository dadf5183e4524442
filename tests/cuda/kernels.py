"""Counts the memory traffic of a Triton kernel from its source."""

import re
from dataclasses import dataclass

NUM_DEPTHS, VOCAB_SIZE, HIDDEN_SIZE = 3, 128_256, 4096
"""The sizes of the step that `tests.cuda.inductor` compiles, for an 8B Llama."""
BYTES = {"fp32": 4, "bf16": 2, "i64": 8, "i32": 4, "i1": 1, "u8": 1}


@dataclass
class Kernel:
    """Holds a Triton kernel that Inductor wrote, with the architecture and size of its compiled form."""

    function: str
    """Name of the fused function."""
    is_backward: bool
    source: str
    bytes_per_element: int
    """Bytes read and written for each element of the rows that the kernel processes. Values shared by a whole row or
    column are not counted."""
    target: str = ""
    """The architecture that the kernel's PTX names."""
    cubin_bytes: int = 0


def bytes_per_element(source: str) -> int:
    """Counts the bytes of the loads and stores whose address depends on both a row and a position in the row, or was
    computed from a loaded value.

    A value that is loaded in two loops over a row counts twice. In a reduction, the names of row indices begin with `x`
    and those of positions with `r0_`. A pointwise kernel has one index.
    """
    signature = re.search(r"'signature': \{(.*?)\}", source)
    assert signature is not None
    dtypes = dict(re.findall(r"'(\w+)': '\*(\w+)'", signature[1]))
    is_reduction = "r0_index" in source
    flat = set(re.findall(r"(\w+) = xindex$", source, re.MULTILINE))
    num_bytes = 0
    for pointer, address in re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\), ", source):
        names = set(re.findall(r"[a-z]\w*", address))
        is_place = any(name.startswith("r0_") for name in names) and any(name.startswith("x") for name in names)
        if any(name.startswith("tmp") for name in names) or (is_place if is_reduction else bool(names & flat)):
            num_bytes += BYTES[dtypes[pointer]]
    return num_bytes
