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
from mtptrain.hidden_states.extraction.fill import fill_shards
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
    shards = shard_ranges(documents.lengths, num_tokens // 2)
    identity = StoreIdentity(TargetIdentity("bench", None, "", "", "", ""), (), "", "", dtype=dtype.value)
    begin_store(directory, identity, num_tokens // 2, range(len(shards)))
    fill_shards(
        RandomStreams(hidden_size), documents, dict(enumerate(shards)), directory, hidden_size, 0, dtype, "", show=False
    )
    finish_store(directory, identity, num_tokens // 2, hidden_size, len(shards))
    return HiddenStore.open(directory)


class RandomStreams:
    """A backend that returns random states."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size, self.generator = hidden_size, torch.Generator().manual_seed(0)

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        for prompts in shards:
            yield ((i, self.states(len(prompt))) for i, prompt in enumerate(prompts))

    def states(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, 1, self.hidden_size, generator=self.generator).bfloat16()
