"""Defines the layout and size of a shard, which store.py describes, and the checksum of each document in it.

The header and the tables come first in the file and the loss mask last: opening a shard reads only its two ends.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import xxhash

from mtptrain.config import StoreDtype
from mtptrain.utils.errors import UserError

HIDDEN_STATES, AUX_HIDDEN_STATES = "hidden_states", "aux_hidden_states"
CHECKSUMS = "document_checksums"
CHECKSUM_BYTES = 16
DOCUMENT_BYTES = 16 + CHECKSUM_BYTES
"""The bytes that each document adds to the tables: its id, offset and checksum."""
ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def scales_of(name: str) -> str:
    return f"{name}_scales"


OPTIONAL = (AUX_HIDDEN_STATES, scales_of(HIDDEN_STATES), scales_of(AUX_HIDDEN_STATES))
CHECKED = ("input_ids", "loss_mask", HIDDEN_STATES, *OPTIONAL)
"""The tensors that a document's checksum covers, in this order."""


def is_fp8(dtype: StoreDtype, name: str) -> bool:
    """Returns whether a store of this dtype keeps the tensor `name` in eight bits."""
    return dtype is StoreDtype.fp8 or (dtype is StoreDtype.fp8_aux and name == AUX_HIDDEN_STATES)


def check_store_dtype(dtype: StoreDtype, capture_layers: Collection[int]) -> None:
    """Raises UserError for `fp8_aux` if no layers are captured."""
    if dtype is StoreDtype.fp8_aux and not capture_layers:
        raise UserError(
            "hidden_states.store_dtype: must be bfloat16 or fp8 for a head that captures no layers, but is fp8_aux, "
            "which keeps only the captured layers in eight bits; set hidden_states.store_dtype=fp8"
        )


def bytes_per_token(hidden_size: int, num_captured: int, dtype: StoreDtype) -> int:
    """Returns how many bytes a token takes on disk. Each document adds `DOCUMENT_BYTES`."""
    last, aux = (
        hidden_size + 4 if is_fp8(dtype, name) else 2 * hidden_size for name in (HIDDEN_STATES, AUX_HIDDEN_STATES)
    )
    return last + num_captured * aux + 4 + 1


@dataclass(frozen=True)
class ShardLayout:
    """The position of each part of a shard in its file."""

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
        """Returns the layout of a shard that holds `tokens`, the tensors that `ShardFile` is constructed with."""
        num_tokens, num_documents = len(tokens["input_ids"]), len(tokens["document_ids"])
        states = {HIDDEN_STATES: [num_tokens, hidden_size]}
        if num_captured:
            states = {AUX_HIDDEN_STATES: [num_tokens, num_captured, hidden_size], **states}
        tables: dict[str, tuple[str, list[int]]] = {
            "document_ids": ("I64", [num_documents]),
            "document_offsets": ("I64", [num_documents + 1]),
            CHECKSUMS: ("U8", [num_documents, CHECKSUM_BYTES]),
        }
        tensors = {  # from wide items to narrow ones, which aligns all of them
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
    """Returns the bytes of a tensor in row-major order, without a copy if the tensor is contiguous and on the CPU."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def document_checksum(tensors: Mapping[str, torch.Tensor | None]) -> bytes:
    """Returns the XXH3-128 of those of a document's tensors that it has: fast enough to check every read for damage."""
    digest = xxhash.xxh3_128()
    for name in CHECKED:
        if (tensor := tensors.get(name)) is not None:
            digest.update(bytes_of(tensor))
    return digest.digest()


def index_checksum(index: bytes | memoryview, loss_mask: bytes | memoryview) -> str:
    """Returns the hexadecimal XXH3-128 of the bytes read to open a shard: `index` (header and tables) and loss mask."""
    digest = xxhash.xxh3_128(index)
    digest.update(loss_mask)
    return digest.hexdigest()
