"""Fills shards with the states of a backend: the main loop of stage 2."""

import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mtptrain.config import StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.extraction.overlapped_writer import OverlappedWriter
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.writer import ShardFile
from mtptrain.utils.progress import ProgressBar


class Streams(Protocol):
    """A backend that runs the target and returns its residual streams."""

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """Yields an iterator for each shard in order.

        A shard's iterator yields, in any order, the index of each prompt in the shard and its states [n, L + 1, H]: the
        captured layers, then the state before the final norm. The caller must exhaust one iterator before it requests
        the next.
        """


def num_tokens(documents: Documents, shards: list[range]) -> int:
    """Returns the number of tokens in these shards."""
    return sum(
        int(documents.document_offsets[shard.stop] - documents.document_offsets[shard.start]) for shard in shards
    )


def fill_shards(
    streams: Streams,
    documents: Documents,
    shards: dict[int, range],
    store_dir: Path,
    hidden_size: int,
    num_captured: int,
    dtype: StoreDtype,
    progress_name: str,
    show: bool = True,
    writer_threads: int = 1,
) -> None:
    """Write shards into a store that `begin_store` has prepared. A document is written while later ones are computed.

    Args:
        streams: the backend.
        documents: all prompts.
        shards: the documents of each shard to write, by the shard's index.
        store_dir: the store.
        hidden_size: H.
        num_captured: L, the number of layers in `aux_hidden_states`.
        dtype: the dtype of the stored states.
        progress_name: name of this process in the progress bar.
        show: whether to show the progress bar.
        writer_threads: number of threads that check, encode and write states.
    """
    total = num_tokens(documents, list(shards.values()))
    prompts = ([documents.token_ids(i) for i in shard] for shard in shards.values())
    try:
        with (
            OverlappedWriter(writer_threads) as writer,
            ProgressBar(
                total=total, unit="tok", unit_scale=True, desc=f"hidden states, {progress_name}", disable=not show
            ) as bar,
        ):
            for (index, shard), shard_states in zip(shards.items(), streams.extract(prompts), strict=True):
                file = ShardFile(store_dir, index, tokens_of_shard(documents, shard), hidden_size, num_captured, dtype)
                writer.begin(file)
                for document, states in shard_states:
                    writer.write(document, states)
                    bar.update(len(states))
                writer.finish()
    except OSError as error:
        is_elsewhere = error.filename is not None and not Path(error.filename).is_relative_to(store_dir)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or is_elsewhere:
            raise  # the backend's own error says it all, such as that the disk of hidden_states.scratch_dir is full
        raise OSError(
            error.errno,
            f"the disk must have room for {bytes_per_token(hidden_size, num_captured, dtype) * total / 1e9:.3f} GB of "
            "hidden states from this process, but is full; finished shards are kept: free some space and run the same "
            "command again",
            str(store_dir),
        ) from error


def tokens_of_shard(documents: Documents, shard: range) -> dict[str, torch.Tensor]:
    """Returns the tensors of a shard that come from the prompts, by their names in the format."""
    offsets = documents.document_offsets[shard.start : shard.stop + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    return {
        "input_ids": torch.tensor(documents.input_ids[tokens]),
        "loss_mask": torch.tensor(documents.loss_mask[tokens]),
        "document_offsets": torch.tensor(offsets - offsets[0]),
        "document_ids": torch.tensor(documents.document_ids[shard.start : shard.stop]),
    }
