"""Stage 2: the frozen target over the training prompts -> hidden-state shards.

Reads `run_dir/prompts/` and the target; writes `run_dir/hidden_states/` (see mtptrain/hidden_states/store.py). The states come from a
backend, transformers in this process or vLLM in one of its own, and are written while the next ones are computed. An interrupted run
continues with any number of ranks, and the finished store is byte for byte that of an undisturbed run.

    torchrun --nproc-per-node 8 -m data_prep.hidden_states recipe=quickstart
    torchrun --nproc-per-node 4 -m data_prep.hidden_states recipe=quickstart train.stream=true     # while mtptrain.train reads and deletes
    python -m data_prep.hidden_states recipe=quickstart plan=true     # what it will need; nothing is run
    torchrun --nproc-per-node 8 -m data_prep.hidden_states recipe=quickstart verify=true     # compare every byte of the store
"""

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import PreTrainedConfig

from mtptrain.command_line import program
from mtptrain.config import Backend, PipelineConfig, StoreDtype, load_config
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.fill import Streams, fill_shards, num_tokens
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams, check_vllm_can_extract
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES, bytes_per_token, check_store_dtype
from mtptrain.hidden_states.store import Manifest, expected_identity
from mtptrain.hidden_states.stream import OPEN_WINDOWS, POLL_S, delete_shards, missing_open_shards, shard_windows
from mtptrain.hidden_states.writer import begin_store, finish_store, has_shard, shard_ranges
from mtptrain.planning.planner import print_plan
from mtptrain.run_dir import require, write_provenance
from mtptrain.serving.vllm_client import find_python
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import refuse_quantised_parts
from mtptrain.target.hub import resolve_target
from mtptrain.target.model import load_target
from mtptrain.utils.distributed import Ranks, init_ranks

from .store_check import verify_store

# Matrix products on a CPU give other bits with another number of threads (seen with fp32 at 2 and bf16 at 4), and torchrun sets
# another number than plain python: one thread, and as many ranks as there are cores.
CPU_THREADS = 1


@program
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    if config.plan:
        print_plan(config)
    elif config.verify:
        verify_store(config.stage_dir("hidden_states"), init_ranks(config.distributed_timeout_hours))
    else:
        extract_hidden_states(config, init_ranks(config.distributed_timeout_hours))


def extract_hidden_states(config: PipelineConfig, ranks: Ranks) -> None:
    """Fill `run_dir/hidden_states`, or what is missing of this part of it; every rank calls this.

    Raises:
        FileNotFoundError: stage 1 has not been run, or there is no vLLM where it is asked for.
        ValueError: the prompts do not fit the target, its lm_head is quantised, the folder holds other states, or the disk is too
            small.
        OSError: the disk became full; what is finished is kept.
    """
    if ranks.device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    settings, store_dir = config.hidden_states, config.stage_dir("hidden_states")
    prompts_dir = require(config.stage_dir("prompts") / "manifest.json", "data_prep.prompts").parent
    prompts_file = require(prompts_dir / f"{Split.train}.safetensors", "data_prep.prompts")
    documents = Documents.load(prompts_file)
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    refuse_quantised_parts(target_dir)  # training would, after hours of extraction
    capture_layers = HEADS[config.head.name].layers_to_capture(config.head, target_config)
    check_store_dtype(settings.store_dtype, capture_layers)
    check_prompts(documents, prompts_file, target_config.vocab_size, target_config.max_position_embeddings)
    if settings.backend is Backend.vllm:
        check_vllm_can_extract(target_config)
        find_python(config.serving.python)
    identity = expected_identity(config, target_dir, capture_layers, prompts_file)
    shards = shard_ranges(documents.lengths, settings.shard_tokens)
    own = range(settings.part, len(shards), settings.num_parts)

    if ranks.local_rank == 0:
        remove_scratch(config)
    finished = begin_store(store_dir, identity, settings.shard_tokens, own) if ranks.is_first else None
    if any(ranks.gather(finished is not None)):
        if finished:
            print(
                f"{store_dir} is finished already: {finished.num_documents:,} documents, {finished.num_tokens:,} tokens", flush=True
            )
        return
    missing = missing_shards(store_dir, own, ranks)
    layout = (target_config.hidden_size, len(capture_layers), settings.store_dtype)
    windows = shard_windows(len(shards), config.train.stream_shards, config.seed) if config.train.stream else []
    if ranks.is_first:
        unwritten = [i for i in range(len(shards)) if i in missing or (i not in own and not has_shard(store_dir, i))]
        written = (
            [shards[i] for i in range(len(shards)) if i not in missing] if windows else []
        )  # on the disk until they are released
        unwritten = fullest_windows(windows, documents, shards) if windows else unwritten
        scratch = scratch_bytes(config, shards, documents, target_config.hidden_size, 1 + len(capture_layers), ranks)
        announce(store_dir, documents, [shards[i] for i in unwritten], *layout, scratch, written)
        hint_ranks(ranks)
        if settings.part == 0:
            write_provenance(store_dir, config)

    if windows:
        with open_backend(config, target_dir, target_config, capture_layers, int(documents.lengths.max()), ranks) as streams:
            follow_training(config, streams, documents, shards, windows, layout, ranks)
        return
    started = time.monotonic()
    mine = {index: shards[index] for index in missing[ranks.rank :: ranks.world_size]}
    if mine:
        with open_backend(config, target_dir, target_config, capture_layers, int(documents.lengths.max()), ranks) as streams:
            who = f"rank {ranks.rank} of {ranks.world_size}"
            fill_shards(streams, documents, mine, store_dir, *layout, who, ranks.is_first, settings.writer_threads)
    ranks.barrier()
    if ranks.is_first:
        manifest = finish_store(store_dir, identity, settings.shard_tokens, target_config.hidden_size, len(shards))
        computed_tokens = num_tokens(documents, [shards[i] for i in missing])
        report(store_dir, manifest, config, len(shards), computed_tokens, time.monotonic() - started)


def fullest_windows(windows: list[list[int]], documents: Documents, shards: list[range]) -> list[int]:
    """Returns the shards of the windows that take the most disk together while training follows."""
    together = [list(chain.from_iterable(windows[i : i + OPEN_WINDOWS])) for i in range(len(windows))]
    return max(together, key=lambda indices: num_tokens(documents, [shards[i] for i in indices]))


def follow_training(
    config: PipelineConfig,
    streams: Streams,
    documents: Documents,
    shards: list[range],
    windows: list[list[int]],
    layout: tuple[int, int, StoreDtype],
    ranks: Ranks,
) -> None:
    """Write shards in the order of training, as far ahead as the disk may hold them, until training has released all of them.

    Ranks share the shards by their places in that order, and do not wait for each other.
    """
    store_dir, who = config.stage_dir("hidden_states"), f"rank {ranks.rank} of {ranks.world_size}"
    own = set(list(chain.from_iterable(windows))[ranks.rank :: ranks.world_size])
    while (missing := missing_open_shards(store_dir, windows)) is not None:
        mine = {index: shards[index] for index in missing if index in own}
        if mine:
            fill_shards(streams, documents, mine, store_dir, *layout, who, ranks.is_first, config.hidden_states.writer_threads)
        else:
            time.sleep(POLL_S)
    ranks.barrier()
    if ranks.is_first:
        delete_shards(store_dir, windows)  # those that were still being written when training ended
        print(f"{store_dir}: training has read the hidden states of all {len(documents):,} documents", flush=True)


def open_backend(
    config: PipelineConfig,
    target_dir: Path,
    target_config: PreTrainedConfig,
    capture_layers: tuple[int, ...],
    longest: int,
    ranks: Ranks,
) -> AbstractContextManager[Streams]:
    """The target as `hidden_states.backend` runs it; gives the captured layers and then the last one before the final norm."""
    settings, layers = config.hidden_states, (*capture_layers, int(target_config.num_hidden_layers))
    if settings.backend is Backend.vllm:
        scratch_dir = scratch_root(config) / f"{scratch_prefix(config)}{ranks.rank}.tmp"
        return VllmStreams(
            target_dir,
            layers,
            settings,
            longest,
            scratch_dir,
            device_index=ranks.local_rank,
            device_type=ranks.device.type,
            python=config.serving.python,
        )
    target = load_target(target_dir, getattr(torch, settings.dtype.value), ranks.device)
    return nullcontext(TransformersStreams(target, layers, settings.batch_tokens, settings.compile))


def scratch_root(config: PipelineConfig) -> Path:
    return Path(config.hidden_states.scratch_dir or config.stage_dir("hidden_states"))


def scratch_prefix(config: PipelineConfig) -> str:
    """Of this part's scratch folders, one per rank; other runs may share the place."""
    store = hashlib.sha256(str(config.stage_dir("hidden_states").resolve()).encode()).hexdigest()[:12]
    return f"mtptrain_{store}_{config.hidden_states.part}_"


def scratch_bytes(
    config: PipelineConfig, shards: list[range], documents: Documents, hidden_size: int, num_streams: int, ranks: Ranks
) -> int:
    """What a backend leaves on the store's disk until shards take it: two of the largest for each rank."""
    settings = config.hidden_states
    if settings.backend is not Backend.vllm or settings.scratch_dir is not None:
        return 0
    largest = max(num_tokens(documents, [shard]) for shard in shards)
    itemsize: int = getattr(torch, settings.dtype.value).itemsize
    return 2 * largest * hidden_size * num_streams * itemsize * ranks.world_size


def remove_scratch(config: PipelineConfig) -> None:
    """What a killed run left, of this part, or of every part where there is only one now."""
    prefix = scratch_prefix(config)
    if config.hidden_states.num_parts == 1:
        prefix = prefix.removesuffix(f"{config.hidden_states.part}_")
    for path in scratch_root(config).glob(f"{prefix}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


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


def missing_shards(store_dir: Path, own: Collection[int], ranks: Ranks) -> list[int]:
    """This part's shards still to be computed: the ranks share the records of those that an interrupted run left."""
    complete = [index for index in list(own)[ranks.rank :: ranks.world_size] if has_shard(store_dir, index)]
    everyone = {index for indices in ranks.gather(complete) for index in indices}
    return [index for index in own if index not in everyone]


def announce(
    store_dir: Path,
    documents: Documents,
    unwritten: list[range],
    hidden_size: int,
    num_captured: int,
    dtype: StoreDtype,
    scratch: int,
    written: Sequence[range] = (),
) -> None:
    """Say what will be written, and refuse where the disk cannot hold it, with the bytes that a backend leaves there meanwhile.

    Where training follows, `unwritten` are the shards that lie there together, and `written` those that make room for them.

    Raises:
        ValueError: free space is smaller than what is still to be written.
    """
    token_bytes = bytes_per_token(hidden_size, num_captured, dtype)
    needed_bytes, written_bytes = (
        num_tokens(documents, list(part)) * token_bytes + sum(map(len, part)) * DOCUMENT_BYTES for part in (unwritten, written)
    )
    missing_bytes = max(0, needed_bytes - written_bytes)
    free_bytes = shutil.disk_usage(store_dir).free
    total_tokens = int(documents.document_offsets[-1])
    print(
        f"hidden states of {len(documents):,} documents: {total_tokens:,} tokens x {token_bytes:,} bytes = "
        f"{total_tokens * token_bytes / 1e9:.3f} GB; to write: {missing_bytes / 1e9:.3f} GB, free: {free_bytes / 1e9:.3f} GB",
        flush=True,
    )
    if unwritten and missing_bytes + scratch > free_bytes:
        beside = f" and {scratch / 1e9:.3f} GB of the backend's files (hidden_states.scratch_dir)" if scratch else ""
        raise ValueError(
            f"{store_dir}: {missing_bytes / 1e9:.3f} GB must be free for the hidden states{beside}, but {free_bytes / 1e9:.3f} GB are; "
            "free space, set run_dir to a larger disk, set hidden_states.store_dtype=fp8, or lower prompts.max_train_tokens and run "
            "data_prep.prompts again"
        )


def hint_ranks(ranks: Ranks) -> None:
    num_cores = os.cpu_count() or 1
    if ranks.device.type == "cpu" and ranks.world_size < num_cores:
        print(f"one thread per rank on a CPU: torchrun --nproc-per-node {num_cores} uses all cores", flush=True)


def report(
    store_dir: Path, manifest: Manifest | None, config: PipelineConfig, num_shards: int, computed_tokens: int, seconds: float
) -> None:
    """A short table of the store, finished or not."""
    settings = config.hidden_states
    speed = f"{computed_tokens:,} tokens in {seconds:.1f} s, {computed_tokens / seconds:,.0f} tokens/s"
    if manifest is None:
        left = [index for index in range(num_shards) if not has_shard(store_dir, index)]
        parts = ", ".join(str(part) for part in sorted({index % settings.num_parts for index in left}))
        rows = {
            "this part": f"{settings.part} of {settings.num_parts}, finished",
            "shards": f"{num_shards:,}, of which {len(left):,} are missing still; the part that ends last finishes the store",
            "unfinished parts": f"{parts}; run one that has failed again with hidden_states.part=N and the same num_parts",
            "computed now": speed,
        }
    else:
        num_bytes = sum(record.num_bytes for record in manifest.shards)
        rows = {
            "documents": f"{manifest.num_documents:,}",
            "tokens": f"{manifest.num_tokens:,}",
            "supervised tokens": f"{manifest.num_supervised_tokens:,}",
            "shards": f"{len(manifest.shards):,}",
            "size": f"{num_bytes / 1e9:.3f} GB, {manifest.identity.dtype}",
            "computed now": speed,
        }
    print(f"{store_dir}", *(f"  {name:<18} {value}" for name, value in rows.items()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
