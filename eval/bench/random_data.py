"""Makes random documents, stores and streams for benchmarks."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.config import PipelineConfig, StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.extraction.fill import Streams, fill_shards
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.hidden_states.writer import begin_store, finish_store, shard_ranges


def random_documents(config: PipelineConfig, vocab_size: int) -> Documents:
    rng = np.random.default_rng(config.seed)
    lengths = np.exp(rng.normal(math.log(config.bench.median_tokens), 0.8, config.bench.documents))
    sizes = np.clip(lengths, 8, config.bench.max_tokens).astype(int).tolist()
    return Documents.from_list([(i, rng.integers(0, vocab_size, n), np.ones(n)) for i, n in enumerate(sizes)])


def random_store(directory: Path, dtype: StoreDtype, num_tokens: int, length: int, hidden_size: int) -> HiddenStore:
    """Writes a store of two shards whose documents all have the same length, and returns it."""
    rng = np.random.default_rng(0)
    documents = Documents.from_list(
        [(i, rng.integers(0, 1000, length), np.ones(length)) for i in range(num_tokens // length)]
    )
    write_store(directory, RandomStreams(hidden_size), documents, num_tokens // 2, (hidden_size, 0, dtype))
    return HiddenStore.open(directory)


def write_store(
    directory: Path,
    streams: Streams,
    documents: Documents,
    shard_tokens: int,
    layout: tuple[int, int, StoreDtype],
    writer_threads: int = 1,
) -> None:
    """Writes a complete store, as stage 2 does.

    Args:
        directory: the store's directory.
        streams: the backend.
        documents: all prompts.
        shard_tokens: as in `shard_ranges`.
        layout: hidden size, number of captured layers and stored dtype.
        writer_threads: number of threads that write states.
    """
    hidden_size, num_captured, dtype = layout
    target, shards = TargetIdentity("bench", None, "", "", "", ""), shard_ranges(documents.lengths, shard_tokens)
    identity = StoreIdentity(target, tuple(range(num_captured)), "", "", dtype=dtype.value)
    begin_store(directory, identity, shard_tokens, range(len(shards)))
    fill_shards(
        streams, documents, dict(enumerate(shards)), directory, *layout, "", show=False, writer_threads=writer_threads
    )
    assert finish_store(directory, identity, shard_tokens, hidden_size, len(shards))


class RandomStreams:
    """A backend that returns random states."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size, self.generator = hidden_size, torch.Generator().manual_seed(0)

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        for prompts in shards:
            yield ((i, self.states(len(prompt))) for i, prompt in enumerate(prompts))

    def states(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, 1, self.hidden_size, generator=self.generator).bfloat16()
