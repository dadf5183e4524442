"""Writes a small store of random states shard by shard."""

from pathlib import Path

import numpy as np
import torch

from mtptrain.config import StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.writer import ShardFile, begin_store, finish_store, shard_ranges

HIDDEN_SIZE, SHARD_TOKENS = 8, 20
LENGTHS = np.array([7, 5, 9, 1, 30, 2, 2, 16, 4])
TARGET = TargetIdentity("models/llama", None, "c" * 64, "w" * 64, "t" * 64, "h" * 64)
IDENTITY = StoreIdentity(TARGET, (), "bfloat16", "p" * 64)


def make_shard(index: int, documents: range, num_captured: int = 0) -> dict[str, torch.Tensor]:
    """Returns random contents of a shard. Document i has id 100 + i."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.tensor(LENGTHS[documents.start : documents.stop])
    size = int(lengths.sum())
    tensors = {
        "input_ids": torch.randint(0, 260, (size,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8),
        "document_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "document_ids": torch.arange(documents.start, documents.stop) + 100,
        "hidden_states": torch.randn(size, HIDDEN_SIZE, generator=generator).bfloat16(),
    }
    if num_captured:
        tensors["aux_hidden_states"] = torch.randn(size, num_captured, HIDDEN_SIZE, generator=generator).bfloat16()
    return tensors


def write_shard(directory: Path, index: int, tensors: dict[str, torch.Tensor], dtype: str = "bfloat16") -> None:
    """Write a whole shard, starting with its last document."""
    states, aux = tensors["hidden_states"][:, None], tensors.get("aux_hidden_states")
    streams = states if aux is None else torch.cat([aux, states], dim=1)
    tokens = {name: tensor for name, tensor in tensors.items() if not name.endswith("hidden_states")}
    file = ShardFile(directory, index, tokens, HIDDEN_SIZE, streams.shape[1] - 1, StoreDtype(dtype))
    offsets = tensors["document_offsets"].tolist()
    for document in reversed(range(len(offsets) - 1)):
        file.write(document, streams[offsets[document] : offsets[document + 1]])
    file.finish()


EVERY_SHARD = range(4)


def make_store(directory: Path, identity: StoreIdentity = IDENTITY) -> list[dict[str, torch.Tensor]]:
    """Write a whole store, and return the tensors of each shard as they were before encoding."""
    assert begin_store(directory, identity, SHARD_TOKENS, EVERY_SHARD) is None
    ranges = shard_ranges(LENGTHS, SHARD_TOKENS)
    shards = [make_shard(index, documents, len(identity.capture_layers)) for index, documents in enumerate(ranges)]
    for index, tensors in enumerate(shards):
        write_shard(directory, index, tensors, identity.dtype)
    finish_store(directory, identity, SHARD_TOKENS, HIDDEN_SIZE, len(shards))
    return shards


def read_all(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
