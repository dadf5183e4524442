"""Reads the header of a GGUF file, llama.cpp's format: its metadata and the places of its tensors.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the package gguf takes
seconds for a large vocabulary, and fails on a damaged file with whatever numpy raises.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from mtptrain.utils.errors import UserError

MAGIC, VERSIONS = b"GGUF", (2, 3)
DOWNLOAD_AGAIN = "download it again"
CHOOSE_ANOTHER = "choose another file, or the model directory that it was converted from"

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The code in `struct` of each type of number in the metadata."""
_STRING, _ARRAY, _MAX_DIMENSIONS = 8, 9, 4


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's place in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Shape in torch's order."""
    start: int
    """Place of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The part of a GGUF file before the data of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def dequantised(self, name: str) -> np.ndarray:
        """Returns a tensor in fp32."""
        tensor = self.tensors[name]
        data = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.num_bytes,))
        rows = data.reshape(-1, tensor.num_bytes * tensor.shape[-1] // math.prod(tensor.shape))
        return dequantize(rows, tensor.kind).reshape(tensor.shape)


def read_header(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file, after comparing it with the size of the file.

    Raises:
        OSError: the file cannot be opened.
        UserError: the file is not GGUF, is damaged or incomplete, or has tensors that cannot be dequantised.
    """
    with path.open("rb") as file:
        if (start := file.read(len(MAGIC))) != MAGIC:
            raise UserError(
                f"{path}: must be a GGUF file, which begins with {MAGIC!r}, but begins with {start!r}; choose another "
                "file, or a model directory"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, len(MAGIC))
            try:
                version = reader.number("I")
                if version not in VERSIONS:
                    raise UserError(
                        f"{path}: the version of the GGUF format must be 2 or 3, in little-endian order, but is "
                        f"{version}; convert the model again with a current llama.cpp"
                    )
                num_tensors, num_keys = reader.number("Q"), reader.number("Q")
                metadata = dict(reader.key_and_value() for _ in range(num_keys))
                infos = dict(reader.tensor_info() for _ in range(num_tensors))
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise UserError(
                    f"{path}: must be a complete GGUF file, but its header is cut off or damaged near byte "
                    f"{reader.position:,} of {len(data):,}; {DOWNLOAD_AGAIN}"
                ) from error
            if (len(metadata), len(infos)) != (num_keys, num_tensors):
                raise UserError(f"{path}: must name each key and tensor once, but repeats one; {DOWNLOAD_AGAIN}")
            return GGUFHeader(path, metadata, _placed(path, infos, metadata, reader.position, len(data)))


@dataclass
class _Reader:
    """Reads values one after the other. Beyond the end of the file, `struct` raises its error."""

    data: mmap.mmap
    position: int

    def numbers(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + codes, self.data, self.position)
        self.position += struct.calcsize("<" + codes)
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        length = self.number("Q")
        text: bytes = self.number(f"{length}s")
        return text.decode()

    def key_and_value(self) -> tuple[str, Any]:
        return self.string(), self.value(self.number("I"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, length = self.numbers("IQ")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        return list(self.numbers(f"{length}{_NUMBERS[kind]}"))

    def tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Returns a tensor's name, its shape in torch's order, its type, and its offset from the start of the data."""
        name, num_dimensions = self.string(), self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise struct.error
        shape = self.numbers(f"{num_dimensions}Q")
        return name, (shape[::-1], *self.numbers("IQ"))


def _placed(
    path: Path,
    infos: dict[str, tuple[tuple[int, ...], int, int]],
    metadata: dict[str, Any],
    header_bytes: int,
    file_bytes: int,
) -> dict[str, GGUFTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(f"{path}: general.alignment must be at least 1, but is {alignment!r}; {DOWNLOAD_AGAIN}")
    data_start = math.ceil(header_bytes / alignment) * alignment
    tensors, expected = {}, 0
    for name, (shape, kind_id, offset) in infos.items():
        kind = _dequantisable(path, name, kind_id)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        start, num_bytes = data_start + offset, math.prod(shape) // block_values * block_bytes
        if math.prod(shape) == 0:
            raise UserError(f"{path}: {name} must hold values, but has the shape {shape}; {DOWNLOAD_AGAIN}")
        if shape[-1] % block_values:
            raise UserError(
                f"{path}: {name} must have rows of whole {kind.name} blocks of {block_values} values, but has the "
                f"shape {shape}; {DOWNLOAD_AGAIN}"
            )
        if offset != expected:
            raise UserError(
                f"{path}: tensors must follow one another, but {name} begins at byte {offset:,} of the data, not at "
                f"{expected:,}; {DOWNLOAD_AGAIN}"
            )
        expected += num_bytes + -num_bytes % alignment
        if (end := start + num_bytes) > file_bytes:
            raise UserError(
                f"{path}: must be a complete GGUF file, but has {file_bytes:,} bytes, and its tensor {name} ends at "
                f"byte {end:,}; {DOWNLOAD_AGAIN}"
            )
        tensors[name] = GGUFTensor(kind, shape, start, num_bytes)
    return tensors


def _dequantisable(path: Path, name: str, kind_id: int) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(kind_id)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        known = {each.value: each.name for each in GGMLQuantizationType}
        raise UserError(
            f"{path}: tensors must have a type that the package gguf can dequantise, but {name} has type "
            f"{known.get(kind_id, kind_id)}; quantise the model in another type, such as Q4_K_M"
        ) from error
    return kind
