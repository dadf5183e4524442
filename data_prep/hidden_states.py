"""Stage 2: run the frozen target on the training prompts and store its hidden states.

Reads `run_dir/prompts/` and the target; writes `run_dir/hidden_states/` (see mtptrain/hidden_states/store.py). The
backend is transformers in this process or vLLM in another; states are written while the next ones are computed. An
interrupted run continues on any number of ranks. With the same settings, the finished store is byte-identical to that
of an uninterrupted run.

    torchrun --nproc-per-node 8 -m mtptrain hidden-states recipe=quickstart
    torchrun --nproc-per-node 4 -m mtptrain hidden-states recipe=quickstart train.stream=true  # alongside training
    mtptrain plan recipe=quickstart     # print the costs only
    torchrun --nproc-per-node 8 -m mtptrain verify recipe=quickstart     # check every byte
"""

import hashlib
import os
import shlex
import shutil
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from mtptrain.cli.stages import settings_of
from mtptrain.config import Backend, PipelineConfig, StoreDtype
from mtptrain.data.identity import StoreIdentity
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.decoding.prompts import check_document_lengths
from mtptrain.engines.process import started
from mtptrain.engines.table import warn_of_limits
from mtptrain.engines.vllm.client import find_python
from mtptrain.engines.vllm.engine import ENVIRONMENT
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.extraction.fill import Streams, fill_shards, num_tokens
from mtptrain.hidden_states.extraction.server_streams import ServerStreams, server_command
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams, check_streams
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES, bytes_per_token, check_store_dtype
from mtptrain.hidden_states.store import MANIFEST, HiddenStore, StoreManifest, find_damage
from mtptrain.hidden_states.stream import (
    OPEN_WINDOWS,
    POLL_S,
    STREAM,
    delete_shards,
    missing_open_shards,
    shard_windows,
)
from mtptrain.hidden_states.writer import begin_store, finish_store, finished_shards, shard_ranges
from mtptrain.init_from.draft_model import check_start
from mtptrain.run_dir import Run, become_cpu_ranks
from mtptrain.settings.precision import announce_precision
from mtptrain.stage_dir import StageDir
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import check_parts, check_weights
from mtptrain.target.loading import check_placement, load_target
from mtptrain.utils.distributed import CPU_THREADS, Ranks, init_ranks
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import unique_temporary, write_text
from mtptrain.utils.startup import started_stage


def main(config: PipelineConfig) -> None:
    run, store_dir = Run(config), config.stage_dir("hidden_states")
    if config.hidden_states.server is not None:
        serve_states(run)
        return
    if started_stage() == "verify":
        verify_store(store_dir, init_ranks(config.distributed_timeout_hours))
        return
    with StageDir(store_dir).writing(part=config.hidden_states.part):
        if not (config.train.stream or run.backend is Backend.vllm):
            become_cpu_ranks(run, config.hidden_states.dtype)
        extract_hidden_states(run, init_ranks(config.distributed_timeout_hours))


def extract_hidden_states(run: Run, ranks: Ranks) -> None:
    """Fill `run_dir/hidden_states` with the missing shards of this part (`hidden_states.part`), on all ranks."""
    config = run.config
    if ranks.device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    # 1. Check everything before the expensive work.
    extraction = prepare_extraction(run)
    if run.backend is Backend.transformers:
        check_placement(run.target.directory, getattr(torch, config.hidden_states.dtype.value), ranks.device)
    if ranks.local_rank == 0:
        remove_scratch(config)
    if not begin_unless_finished(extraction, ranks):
        return
    missing = missing_shards(extraction.store_dir, extraction.own, ranks)
    if ranks.is_first:
        warn_of_limits(config.export.engine, config.head, run.target.config, run.target.gguf)
        run.announce_mask_token()
        announce(extraction)
        announce_precision("hidden_states.dtype", config.hidden_states.dtype)
        if config.hidden_states.part == 0:
            StageDir(extraction.store_dir).record(config)

    # 2. Run the target and write shards.
    started = time.monotonic()
    rank_missing = missing[ranks.rank :: ranks.world_size]
    if extraction.windows or rank_missing:
        with open_backend(extraction, ranks) as streams:
            if extraction.windows:
                follow_training(extraction, streams, ranks)
            else:
                fill(extraction, streams, rank_missing, ranks)
    ranks.barrier()

    # 3. Finish the store, unless training has read and deleted it.
    if ranks.is_first and not extraction.windows:
        hidden_size, num_shards = run.target.config.hidden_size, len(extraction.shards)
        shard_tokens = config.hidden_states.shard_tokens
        manifest = finish_store(extraction.store_dir, extraction.identity, shard_tokens, hidden_size, num_shards)
        if config.hidden_states.num_servers:
            shutil.rmtree(config.stage_dir("servers"), ignore_errors=True)
        computed_tokens = num_tokens(extraction.documents, extraction.select(missing))
        report(extraction, manifest, computed_tokens, time.monotonic() - started)


@dataclass(frozen=True)
class Extraction:
    config: PipelineConfig
    target: TargetFiles
    capture_layers: tuple[int, ...]
    documents: Documents
    identity: StoreIdentity
    shards: list[range]
    """The range of documents in each shard of the store."""
    own: range
    """Indices of the shards that this part of the extraction writes (`hidden_states.part`)."""
    windows: list[list[int]]
    """Shards of each window, in the order in which training reads them; empty without `train.stream`."""

    @property
    def store_dir(self) -> Path:
        return self.config.stage_dir("hidden_states")

    @property
    def layout(self) -> tuple[int, int, StoreDtype]:
        """Hidden size, number of captured layers and stored dtype."""
        return self.target.config.hidden_size, len(self.capture_layers), self.config.hidden_states.store_dtype

    @property
    def asked(self) -> tuple[TargetFiles, tuple[int, ...], torch.dtype, int]:
        """The target, the captured layers followed by the last one, the target's dtype and the longest document."""
        layers = (*self.capture_layers, int(self.target.config.num_hidden_layers))
        dtype = getattr(torch, self.config.hidden_states.dtype.value)
        return self.target, layers, dtype, int(self.documents.lengths.max())

    def select(self, indices: Iterable[int]) -> list[range]:
        return [self.shards[index] for index in indices]


def prepare_extraction(run: Run) -> Extraction:
    """Read the prompts and the target's config, and check that they match each other and the settings."""
    config, settings, documents = run.config, run.config.hidden_states, run.documents(Split.train)
    target_config = run.target.config
    # Training would refuse them only after hours of extraction.
    check_parts(run.target.directory, check_weights(run.target.directory))
    head_type = HEADS[config.head.name]
    head_type.check_trainable(config.head, target_config)
    capture_layers = head_type.resolve_capture_layers(config.head, target_config)
    check_store_dtype(settings.store_dtype, capture_layers)
    longest = int(documents.lengths.max())
    check_document_lengths(longest, target_config.max_position_embeddings, "target")
    with torch.device("meta"):
        check_document_lengths(longest, build_head(config.head, target_config).context_tokens, "draft model")
    check_start(config.head, run.target)
    if run.backend is Backend.vllm and not settings.asks_servers:
        find_python(config.serving.of("vllm").program)
    identity = run.identity(capture_layers)
    shards = shard_ranges(documents.lengths, settings.shard_tokens)
    own = range(settings.part, len(shards), settings.num_parts)
    windows = shard_windows(len(shards), config.train.stream_shards, config.seed) if config.train.stream else []
    return Extraction(config, run.target, capture_layers, documents, identity, shards, own, windows)


def begin_unless_finished(extraction: Extraction, ranks: Ranks) -> bool:
    """Prepare the store's directory and return True. If the store is finished, print that and return False."""
    store_dir, shard_tokens = extraction.store_dir, extraction.config.hidden_states.shard_tokens
    manifest = None
    if ranks.is_first:
        stage_dir = StageDir(store_dir)
        stage_dir.claim(extraction.config)
        manifest = begin_store(store_dir, extraction.identity, shard_tokens, extraction.own)
        config = extraction.config
        writes_manifest = not store_dir.is_symlink() and config.hidden_states.part == 0
        if manifest and writes_manifest and not stage_dir.was_made_with(config, settings_of("hidden-states")):
            # Other settings gave the same states. Record them and date the manifest anew, so that mtptrain run passes
            # over this stage.
            stage_dir.record(config)
            (store_dir / MANIFEST).touch()
    if manifest:
        print(f"{store_dir} is finished already: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens")
    return not any(ranks.gather(manifest is not None))


def fill(extraction: Extraction, streams: Streams, indices: Sequence[int], ranks: Ranks) -> None:
    shards = dict(zip(indices, extraction.select(indices), strict=True))
    who, where = f"rank {ranks.rank} of {ranks.world_size}", (extraction.store_dir, *extraction.layout)
    fill_shards(streams, extraction.documents, shards, *where, who, ranks.is_first)


def follow_training(extraction: Extraction, streams: Streams, ranks: Ranks) -> None:
    """Write the shards of the first `OPEN_WINDOWS` windows that training has not released, until it has released all.

    Ranks divide the shards by their position in the order of training, and do not wait for each other.
    """
    windows = extraction.windows
    rank_shards = set(list(chain.from_iterable(windows))[ranks.rank :: ranks.world_size])
    while (missing := missing_open_shards(extraction.store_dir, windows)) is not None:
        rank_missing = [index for index in missing if index in rank_shards]
        if rank_missing:
            fill(extraction, streams, rank_missing, ranks)
        else:
            time.sleep(POLL_S)
    ranks.barrier()
    if ranks.is_first:
        delete_shards(extraction.store_dir, windows)  # shards that were still being written when training ended
        num_documents = len(extraction.documents)
        print(
            f"{extraction.store_dir}: training has read the hidden states of all {num_documents:,} documents; to train "
            f"on them again, first delete {STREAM} here and the folder train in run_dir"
        )


def open_backend(extraction: Extraction, ranks: Ranks) -> AbstractContextManager[Streams]:
    """Returns a backend for the target. Its streams are the captured layers, followed by the last layer."""
    config, settings = extraction.config, extraction.config.hidden_states
    target, layers, dtype, longest = extraction.asked
    if settings.asks_servers:
        files = [config.stage_dir("servers") / str(number) for number in range(settings.num_servers)]
        if ranks.is_first and files:
            print(f"servers are asked once their addresses are in {files[0].parent}", flush=True)
        elif ranks.is_first:
            command = server_command(*extraction.asked, settings.tensor_parallel_size)
            print(f"each server is started by: {command}", flush=True)
        return ServerStreams(settings.servers or files, *extraction.asked)
    if extraction.identity.backend == Backend.vllm:
        return VllmStreams(
            target.directory,
            layers,
            settings,
            longest,
            scratch_dir(config, config.hidden_states.part, ranks.rank),
            local_rank=ranks.local_rank,
            python=config.serving.of("vllm").program,
        )
    model = load_target(target.directory, dtype, ranks.device)
    check_streams(model)
    return nullcontext(TransformersStreams(model, layers, settings.batch_tokens, settings.compile))


def serve_states(run: Run) -> None:
    """Run server `hidden_states.server`, which other nodes reach at the address that it writes into a file, until it is
    stopped. Raises UserError if it ends by itself."""
    config, settings = run.config, run.config.hidden_states
    place = config.stage_dir("servers") / str(settings.server)
    place.parent.mkdir(parents=True, exist_ok=True)
    python = find_python(config.serving.of("vllm").program)
    command = server_command(*prepare_extraction(run).asked, settings.tensor_parallel_size, f"{place.resolve()}_states")
    if (num_gpus := torch.cuda.device_count()) > settings.tensor_parallel_size:
        warn(f"hidden_states.tensor_parallel_size: should be {num_gpus}, as many GPUs as are here; the others are idle")
    words = ["env", f"PATH={python.parent}:{os.environ['PATH']}", *shlex.split(command)]
    with started("vllm serve", words, Path(f"{place}.log"), ENVIRONMENT, host="0.0.0.0") as server:
        host = os.environ.get("MTPTRAIN_NODE_ADDRESS") or socket.gethostname()
        write_text(place, f"http://{host}:{server.url.rpartition(':')[2]}", unique_temporary(place))
        server.wait()
        server.process.wait()
        server.check()


def scratch_dir(config: PipelineConfig, part: int | str, rank: int | str) -> Path:
    """Returns the temporary folder of a rank. It names the store, because other runs may use the same parent folder."""
    settings, store_dir = config.hidden_states, config.stage_dir("hidden_states")
    store = hashlib.sha256(str(store_dir.resolve()).encode()).hexdigest()[:12]
    return Path(settings.scratch_dir or store_dir) / f"mtptrain_{store}_{part}_{rank}.tmp"


def remove_scratch(config: PipelineConfig) -> None:
    """Remove temporary folders left by killed runs of this part, or of all parts if there is one."""
    settings = config.hidden_states
    pattern = scratch_dir(config, settings.part if settings.num_parts > 1 else "*", "*")
    for path in list(pattern.parent.glob(pattern.name)):
        shutil.rmtree(path, ignore_errors=True)


def missing_shards(store_dir: Path, own: Collection[int], ranks: Ranks) -> list[int]:
    """Returns the shards of this part that are not computed yet. Ranks share the search for finished shards."""
    complete = finished_shards(store_dir, list(own)[ranks.rank :: ranks.world_size])
    finished = {index for indices in ranks.gather(set(complete)) for index in indices}
    return [index for index in own if index not in finished]


def announce(extraction: Extraction) -> None:
    """Print the disk space that is needed, with streaming that of the fullest windows, and refuse if less is free."""
    store_dir, documents, windows = extraction.store_dir, extraction.documents, extraction.windows
    token_bytes, num_shards = bytes_per_token(*extraction.layout), len(extraction.shards)

    def size(indices: Iterable[int]) -> int:
        shards = extraction.select(indices)
        return num_tokens(documents, shards) * token_bytes + sum(map(len, shards)) * DOCUMENT_BYTES

    open_windows = [list(chain.from_iterable(windows[i : i + OPEN_WINDOWS])) for i in range(len(windows))]
    needed_bytes = max(map(size, open_windows)) if windows else size(range(num_shards))
    missing_bytes = max(0, needed_bytes - size(finished_shards(store_dir, range(num_shards))))
    free_bytes, total_tokens = shutil.disk_usage(store_dir).free, int(documents.document_offsets[-1])
    print(
        f"hidden states of {len(documents):,} documents: {total_tokens:,} tokens x {token_bytes:,} bytes = "
        f"{total_tokens * token_bytes / 1e9:.3f} GB; space needed: {missing_bytes / 1e9:.3f} GB, free: "
        f"{free_bytes / 1e9:.3f} GB"
    )
    if missing_bytes > free_bytes:
        needs_less = "lower prompts.max_train_tokens and run mtptrain prompts again"
        if windows:  # only these must fit, however many tokens there are
            needs_less = "lower train.stream_shards or hidden_states.shard_tokens"
        if extraction.config.hidden_states.store_dtype is not StoreDtype.fp8:
            needs_less = f"set hidden_states.store_dtype=fp8, or {needs_less}"
        raise UserError(
            f"{store_dir}: {missing_bytes / 1e9:.3f} GB must be free for the hidden states, but only "
            f"{free_bytes / 1e9:.3f} GB are; free more, or move run_dir to a larger disk. To need less, delete "
            f"{store_dir} and {needs_less}"
        )


def report(extraction: Extraction, manifest: StoreManifest | None, computed_tokens: int, seconds: float) -> None:
    """Print a short table of the store. `manifest` is None if other parts are unfinished."""
    store_dir, settings, num_shards = extraction.store_dir, extraction.config.hidden_states, len(extraction.shards)
    rows = {} if manifest is None else rows_of(manifest)
    if manifest is None:
        left = set(range(num_shards)) - finished_shards(store_dir, range(num_shards)).keys()
        parts = ", ".join(str(part) for part in sorted({index % settings.num_parts for index in left}))
        rows["shards"] = f"{num_shards:,}, {len(left):,} still missing; the last part to finish completes the store"
        rows["unfinished parts"] = f"{parts}; to rerun a failed one, set hidden_states.part=N and the same num_parts"
    rows["computed now"] = f"{computed_tokens:,} tokens in {seconds:.1f} s, {computed_tokens / seconds:,.0f} tokens/s"
    print_rows(str(store_dir), rows)


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    print(title, *(f"  {name:<18} {value}" for name, value in rows.items()), sep="\n")


def rows_of(manifest: StoreManifest) -> dict[str, str]:
    return {
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        "supervised tokens": f"{manifest.num_supervised_tokens:,}",
        "shards": f"{len(manifest.shards):,}",
        "size": f"{sum(record.num_bytes for record in manifest.shards) / 1e9:.3f} GB, {manifest.identity.dtype}",
    }


def verify_store(directory: Path, ranks: Ranks) -> None:
    """Compare every shard of a store with its hash in the manifest, and print a table. Every rank must call this."""
    store, started = HiddenStore.open(directory), time.monotonic()
    shards = range(ranks.rank, len(store.manifest.shards), ranks.world_size)
    damage_by_rank = ranks.gather(find_damage(store, shards, show_progress=ranks.is_first))
    damaged = {index: problem for damage in damage_by_rank for index, problem in damage.items()}
    if ranks.is_first:
        rows = rows_of(store.manifest) | {
            "damaged": f"{len(damaged):,}",
            "read in": f"{time.monotonic() - started:.1f} s",
        }
        print_rows(f"verify {directory}", rows)
        if damaged:
            raise UserError("\n".join(damaged[index] for index in sorted(damaged)))
