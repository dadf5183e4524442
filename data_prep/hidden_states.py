"""Stage 2: the frozen target over the training prompts -> hidden-state shards.

Reads `run_dir/prompts/` and the target; writes `run_dir/hidden_states/` (see mtptrain/hidden_store.py). Documents share a forward
only where their lengths are equal, so nothing is padded. An interrupted run continues with any number of ranks, and the finished
store is byte for byte that of an undisturbed run.

    torchrun --nproc-per-node 8 -m data_prep.hidden_states recipe=quickstart
"""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import hydra
import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from tqdm import tqdm

from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.distributed import Ranks, init_ranks
from mtptrain.heads import HEADS
from mtptrain.hidden_store import Manifest, expected_identity
from mtptrain.hidden_store_writer import begin_store, finish_store, has_shard, shard_ranges, write_shard
from mtptrain.prompt_files import Documents, Split
from mtptrain.run_dir import require, write_provenance
from mtptrain.target import Target, load_target, read_target_config, resolve_target

# Matrix products on a CPU give other bits with another number of threads (seen with fp32 at 2 and bf16 at 4), and torchrun sets
# another number than plain python: one thread, and as many ranks as there are cores.
CPU_THREADS = 1


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    extract_hidden_states(config, init_ranks())


def extract_hidden_states(config: PipelineConfig, ranks: Ranks) -> None:
    """Fill `run_dir/hidden_states`, or what is missing of it; every rank calls this.

    Raises:
        FileNotFoundError: stage 1 has not been run.
        ValueError: the prompts do not fit the target, the folder holds other states, or the disk is too small.
    """
    if ranks.device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    settings, store_dir = config.hidden_states, config.stage_dir("hidden_states")
    prompts_dir = require(config.stage_dir("prompts") / "manifest.json", "data_prep.prompts").parent
    prompts_file = require(prompts_dir / f"{Split.train}.safetensors", "data_prep.prompts")
    documents = Documents.load(prompts_file)
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    capture_layers = HEADS[config.head.name].layers_to_capture(config.head, target_config)
    check_prompts(documents, prompts_file, target_config.vocab_size, target_config.max_position_embeddings)
    identity = expected_identity(config, target_dir, capture_layers, prompts_file)
    shards = shard_ranges(documents.lengths, settings.shard_tokens)

    finished = begin_store(store_dir, identity, settings.shard_tokens) if ranks.is_first else None
    if any(ranks.gather(finished is not None)):
        if finished:
            print(
                f"{store_dir} is finished already: {finished.num_documents:,} documents, {finished.num_tokens:,} tokens", flush=True
            )
        return
    missing = missing_shards(store_dir, len(shards), ranks)
    if ranks.is_first:
        announce(store_dir, documents, [shards[i] for i in missing], target_config.hidden_size, len(capture_layers), ranks)
        write_provenance(store_dir, config)

    started = time.monotonic()
    target = load_target(target_dir, getattr(torch, settings.dtype.value), ranks.device)
    mine = {index: shards[index] for index in missing[ranks.rank :: ranks.world_size]}
    fill_shards(target, documents, mine, capture_layers, settings.batch_tokens, store_dir, ranks)
    ranks.barrier()
    if ranks.is_first:
        manifest = finish_store(store_dir, identity, settings.shard_tokens, target_config.hidden_size, len(shards))
        report(store_dir, manifest, num_tokens(documents, [shards[i] for i in missing]), time.monotonic() - started)


def check_prompts(documents: Documents, path: Path, vocab_size: int, max_position_embeddings: int) -> None:
    """Refuse what the target cannot read.

    Raises:
        ValueError: there are no documents, a document is too long, or a token is outside the vocabulary.
    """
    if len(documents) == 0:
        raise ValueError(
            f"{path}: must hold at least one document, but holds none; correct prompts.paths and run data_prep.prompts"
        )
    longest, largest_id = int(documents.lengths.max()), int(documents.input_ids.max())
    if longest > max_position_embeddings:
        raise ValueError(
            f"{path}: documents must have at most {max_position_embeddings} tokens, the target's max_position_embeddings, "
            f"but the longest has {longest}; set prompts.max_document_tokens={max_position_embeddings} or less and run "
            "data_prep.prompts again"
        )
    if largest_id >= vocab_size:
        raise ValueError(
            f"{path}: token ids must be below {vocab_size}, the target's vocab_size, but the largest is {largest_id}; the prompts "
            "were made with another tokenizer: run data_prep.prompts again with this target"
        )


def missing_shards(store_dir: Path, num_shards: int, ranks: Ranks) -> list[int]:
    """Shards still to be computed: the ranks share the reading of those that an interrupted run left."""
    complete = [index for index in range(ranks.rank, num_shards, ranks.world_size) if has_shard(store_dir, index)]
    everyone = {index for indices in ranks.gather(complete) for index in indices}
    return [index for index in range(num_shards) if index not in everyone]


def num_tokens(documents: Documents, shards: list[range]) -> int:
    return sum(int(documents.document_offsets[shard.stop] - documents.document_offsets[shard.start]) for shard in shards)


def announce(
    store_dir: Path, documents: Documents, missing: list[range], hidden_size: int, num_captured: int, ranks: Ranks
) -> None:
    """Say what will be written, and refuse where the disk cannot hold it.

    Raises:
        ValueError: free space is smaller than what is still to be written.
    """
    bytes_per_token = 2 * hidden_size * (1 + num_captured) + 4 + 1  # bf16 states, i32 token, u8 mask
    missing_bytes = num_tokens(documents, missing) * bytes_per_token + sum(map(len, missing)) * 16
    free_bytes = shutil.disk_usage(store_dir).free
    total_tokens = int(documents.document_offsets[-1])
    print(
        f"hidden states of {len(documents):,} documents: {total_tokens:,} tokens x {bytes_per_token:,} bytes = "
        f"{total_tokens * bytes_per_token / 1e9:.3f} GB; to write: {missing_bytes / 1e9:.3f} GB, free: {free_bytes / 1e9:.3f} GB",
        flush=True,
    )
    if missing_bytes > free_bytes:
        raise ValueError(
            f"{store_dir}: {missing_bytes / 1e9:.3f} GB must be free for the hidden states, but {free_bytes / 1e9:.3f} GB are; "
            "free space, set run_dir to a larger disk, or lower prompts.max_train_tokens and run data_prep.prompts again"
        )
    num_cores = os.cpu_count() or 1
    if ranks.device.type == "cpu" and ranks.world_size < num_cores:
        print(f"one thread per rank on a CPU: torchrun --nproc-per-node {num_cores} uses all cores", flush=True)


def fill_shards(
    target: Target,
    documents: Documents,
    shards: dict[int, range],
    capture_layers: tuple[int, ...],
    batch_tokens: int,
    store_dir: Path,
    ranks: Ranks,
) -> None:
    """Compute and write this rank's shards; one is written while the next is computed."""
    total = num_tokens(documents, list(shards.values()))
    description = f"hidden states, rank {ranks.rank} of {ranks.world_size}"
    with (
        ThreadPoolExecutor(max_workers=1) as writer,
        tqdm(total=total, unit="tok", unit_scale=True, desc=description, disable=not ranks.is_first) as bar,
    ):
        written: Future[None] | None = None
        for index, shard in shards.items():
            tensors = compute_shard(target, documents, shard, capture_layers, batch_tokens, bar)
            if written:
                written.result()  # no more than two shards in memory
            written = writer.submit(write_shard, store_dir, index, tensors)
        if written:
            written.result()


def compute_shard(
    target: Target, documents: Documents, shard: range, capture_layers: tuple[int, ...], batch_tokens: int, bar: tqdm
) -> dict[str, torch.Tensor]:
    """All tensors of a shard, by the names of the format; batches never reach over its edge, so its bits are its own."""
    tensors = empty_shard(documents, shard, target.config.hidden_size, len(capture_layers))
    starts = tensors["document_offsets"].tolist()
    for batch in equal_length_batches(np.diff(starts), batch_tokens):
        input_ids = torch.from_numpy(np.stack([documents.tokens(shard.start + i) for i in batch])).long()  # [B, S]
        *aux, last = residual_streams(target, input_ids, (*capture_layers, target.config.num_hidden_layers))
        for row, i in enumerate(batch):
            tensors["hidden_states"][starts[i] : starts[i + 1]] = last[row]
            for layer, stream in enumerate(aux):
                tensors["aux_hidden_states"][starts[i] : starts[i + 1], layer] = stream[row]
        bar.update(input_ids.numel())
    return tensors


def empty_shard(documents: Documents, shard: range, hidden_size: int, num_captured: int) -> dict[str, torch.Tensor]:
    """A shard with its documents in place and room for the states."""
    offsets = documents.document_offsets[shard.start : shard.stop + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    size = tokens.stop - tokens.start
    tensors = {
        "input_ids": torch.tensor(documents.input_ids[tokens]),
        "loss_mask": torch.tensor(documents.loss_mask[tokens]),
        "document_offsets": torch.tensor(offsets - offsets[0]),
        "document_ids": torch.tensor(documents.document_ids[shard.start : shard.stop]),
        "hidden_states": torch.empty(size, hidden_size, dtype=torch.bfloat16),
    }
    if num_captured:
        tensors["aux_hidden_states"] = torch.empty(size, num_captured, hidden_size, dtype=torch.bfloat16)
    return tensors


def equal_length_batches(lengths: NDArray[np.int64], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of documents of one length, at most `batch_tokens` tokens together, at least one document; the longest first."""
    order = np.argsort(-lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        size = max(1, batch_tokens // int(lengths[group[0]]))
        for start in range(0, len(group), size):
            yield group[start : start + size].tolist()


@torch.inference_mode()
def residual_streams(target: Target, input_ids: torch.Tensor, after_layers: tuple[int, ...]) -> list[torch.Tensor]:
    """Residual streams of the target after the given numbers of decoder layers.

    Args:
        target: the frozen target.
        input_ids: [B, S], without padding.
        after_layers: k for the stream after k layers; 0 gives the embeddings, the number of layers the state before the final norm.

    Returns:
        For each k, [B, S, H] on the CPU, in the target's dtype.
    """
    with target.capturing(after_layers) as streams:
        target.model.model(input_ids=input_ids.to(target.device), use_cache=False)
    return [streams[k].cpu() for k in after_layers]


def report(store_dir: Path, manifest: Manifest, computed_tokens: int, seconds: float) -> None:
    """A short table of the finished store."""
    num_bytes = sum(record.num_bytes for record in manifest.shards)
    rows = {
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        "supervised tokens": f"{manifest.num_supervised_tokens:,}",
        "shards": f"{len(manifest.shards):,}",
        "size": f"{num_bytes / 1e9:.3f} GB",
        "computed now": f"{computed_tokens:,} tokens in {seconds:.1f} s, {computed_tokens / seconds:,.0f} tokens/s",
    }
    print(f"{store_dir}", *(f"  {name:<18} {value}" for name, value in rows.items()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
