"""The layout of a shard of hidden states, its size, and the checksum of each document in it.

The tensors and their meaning are in mtptrain/hidden_store.py. The header and the tables of the documents come first in the file and
the loss mask last, so that opening a shard reads these two ends alone.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import xxhash

from mtptrain.config import StoreDtype

HIDDEN_STATES, AUX_HIDDEN_STATES = "hidden_states", "aux_hidden_states"
CHECKSUMS = "document_checksums"
CHECKSUM_BYTES = 16
DOCUMENT_BYTES = 16 + CHECKSUM_BYTES
"""The size of a document's id, offset and checksum."""
ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def scales_of(name: str) -> str:
    """The tensor of scales that goes with one of e4m3 values."""
    return f"{name}_scales"


OPTIONAL = (AUX_HIDDEN_STATES, scales_of(HIDDEN_STATES), scales_of(AUX_HIDDEN_STATES))
CHECKED = ("input_ids", "loss_mask", HIDDEN_STATES, *OPTIONAL)
"""The tensors that a document's checksum covers, in this order."""


def is_fp8(dtype: StoreDtype, name: str) -> bool:
    """Whether a store keeps the states `name` in eight bits."""
    return dtype is StoreDtype.fp8 or (dtype is StoreDtype.fp8_aux and name == AUX_HIDDEN_STATES)


def check_store_dtype(dtype: StoreDtype, capture_layers: Collection[int]) -> None:
    """Raises ValueError where a dtype for captured layers is asked for and there are none."""
    if dtype is StoreDtype.fp8_aux and not capture_layers:
        raise ValueError(
            "hidden_states.store_dtype: must be bfloat16 or fp8 for a head that captures no layers, but is fp8_aux, which keeps "
            "captured layers alone in eight bits; set one of these"
        )


def bytes_per_token(hidden_size: int, num_captured: int, dtype: StoreDtype) -> int:
    """Returns the bytes of a token on disk: its id, its mask, and the states of every layer with their scales.

    Each document costs `DOCUMENT_BYTES` besides.
    """
    last, aux = (hidden_size + 4 if is_fp8(dtype, name) else 2 * hidden_size for name in (HIDDEN_STATES, AUX_HIDDEN_STATES))
    return last + num_captured * aux + 4 + 1


@dataclass(frozen=True)
class ShardLayout:
    """Where the parts of a shard are in its file."""

    header: bytes
    """The safetensors header."""
    begins: dict[str, int]
    """The position of each tensor's first byte."""
    index_bytes: int
    """The size of the header and the tables of documents together."""
    num_bytes: int
    """The size of the file."""

    @staticmethod
    def of(tokens: Mapping[str, torch.Tensor], hidden_size: int, num_captured: int, dtype: StoreDtype) -> "ShardLayout":
        """Lay out a shard that holds `tokens`, as `ShardFile` takes them."""
        num_tokens, num_documents = len(tokens["input_ids"]), len(tokens["document_ids"])
        states = {HIDDEN_STATES: [num_tokens, hidden_size]}
        if num_captured:
            states = {AUX_HIDDEN_STATES: [num_tokens, num_captured, hidden_size], **states}
        tables: dict[str, tuple[str, list[int]]] = {
            "document_ids": ("I64", [num_documents]),
            "document_offsets": ("I64", [num_documents + 1]),
            CHECKSUMS: ("U8", [num_documents, CHECKSUM_BYTES]),
        }
        tensors = {  # from wide items to narrow ones, so that all are aligned
            **{scales_of(name): ("F32", shape[:-1]) for name, shape in states.items() if is_fp8(dtype, name)},
            "input_ids": ("I32", [num_tokens]),
            **{name: ("BF16", shape) for name, shape in states.items() if not is_fp8(dtype, name)},
            **{name: ("F8_E4M3", shape) for name, shape in states.items() if is_fp8(dtype, name)},
            "loss_mask": ("U8", [num_tokens]),
        }
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        relative: dict[str, int] = {}
        end = 0
        for name, (kind, shape) in {**tables, **tensors}.items():
            relative[name], end = end, end + math.prod(shape) * ITEM_BYTES[kind]
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [relative[name], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begins = {name: len(header) + begin for name, begin in relative.items()}
        return ShardLayout(header, begins, begins[next(iter(tensors))], len(header) + end)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in row-major order, without a copy where it is contiguous on the CPU."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def document_checksum(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the XXH3-128 of a document's tensors, which are on the CPU.

    It finds damage, not intent, at the speed of memory: a core hashes ten times as many bytes as with SHA-256, so that every read
    can be checked.
    """
    digest = xxhash.xxh3_128()
    for name in CHECKED:
        if name in tensors:
            digest.update(bytes_of(tensors[name]))
    return digest.digest()


def index_checksum(index: bytes | memoryview, loss_mask: bytes | memoryview) -> str:
    """Returns the XXH3-128, in hexadecimal, of what opening a shard reads: header and tables of documents, and the loss mask."""
    digest = xxhash.xxh3_128(index)
    digest.update(loss_mask)
    return digest.hexdigest()
