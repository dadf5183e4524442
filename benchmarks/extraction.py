"""Compares the speed of extraction with that of a bare forward pass.

    python -m benchmarks.extraction recipe=quickstart
    python -m benchmarks.extraction recipe=quickstart --8b --documents 256     # on a GPU, random weights

- *bare forward*: the target over packed documents, without keeping states;
- *ours*: the transformers backend writing a store to disk, in bf16 and fp8;
- *plain loop*: padded batches of eight, `output_hidden_states=True` and `torch.save` of the head's inputs, as most
  scripts do.

With `hidden_states.servers=[URL,URL]`, one run that asks all of these is compared with a run for each, alone and at the
same time. With `--cores 0 1`, this process has the core of the server that it asks alone, so that a server has the same
half of a small machine alone and beside the other; start the servers with `taskset --cpu-list`, too.

The candidates take turns. Torch uses one thread, torchrun's default for each rank. The writer adds
`WRITER_THREADS` threads and one that hashes shards. Documents have random tokens and log-normal lengths.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mtptrain.config import PipelineConfig, StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.data.prompt_files import Documents
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.fill import Streams, fill_shards
from mtptrain.hidden_states.extraction.server_streams import ServerStreams
from mtptrain.hidden_states.extraction.transformers_streams import (
    TransformersStreams,
    forward_documents,
    token_budget_batches,
)
from mtptrain.hidden_states.writer import begin_store, finish_store, shard_ranges
from mtptrain.planning.costs import target_costs
from mtptrain.run_dir import Run
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.training.flops import matmul_peak
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.errors import UserError

from .command import fastest, llama_8b, positive, print_table, run_benchmark

MEDIAN_TOKENS, MAX_TOKENS = 250, 2000
"""Median and maximum length of the documents that are extracted."""
PLAIN_BATCH = 8
Layout = tuple[int, int, StoreDtype]
"""The hidden size, the number of captured layers and the dtype of a store."""


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    device, settings = init_ranks(config.distributed_timeout_hours).device, config.hidden_states
    torch.set_num_threads(1)
    dtype = getattr(torch, settings.dtype.value)
    files = Run(config).target
    target_config = llama_8b(32) if options.is_8b else files.config
    documents = random_documents(options.documents, target_config.vocab_size)
    layers = HEADS[config.head.name].resolve_capture_layers(config.head, target_config)
    captured = (*layers, int(target_config.num_hidden_layers))
    sizes = int(target_config.hidden_size), len(layers)
    if settings.servers:
        compare_servers(config, options, documents, captured, (*sizes, settings.store_dtype))
        return
    target = random_8b(device, dtype) if options.is_8b else load_target(files.directory, dtype, device)
    num_tokens, batch_tokens = len(documents.input_ids), settings.batch_tokens
    with tempfile.TemporaryDirectory(prefix="mtptrain-bench-") as name:
        folder = Path(name)
        fill = partial(fill_and_remove, folder, documents)
        ours = TransformersStreams(target, captured, batch_tokens, settings.compile)
        candidates: dict[str, Callable[[], object]] = {
            "bare forward": partial(bare_forward, target, documents, batch_tokens),
            "ours": partial(fill, ours, (*sizes, StoreDtype.bfloat16)),
            "ours, fp8": partial(fill, ours, (*sizes, StoreDtype.fp8)),
            "plain loop": partial(plain_loop, target, documents, layers, folder),
        }
        seconds = fastest({name: partial(seconds_of, run) for name, run in candidates.items()}, options.repeats)
    costs = target_costs(target.config)
    flops = sum(length * costs.flops_per_token(length) for length in documents.lengths.tolist())
    mfu = flops / seconds["bare forward"] / matmul_peak(device, dtype)
    title = f"Extraction, {'8b' if options.is_8b else config.target.path}, head {config.head.name}, {dtype}"
    columns = {"": ("name", ""), "tokens/s": ("speed", ",.2f"), "vs. bare forward": ("ratio", ".3f")}
    bare = seconds["bare forward"]
    rows = [{"name": name, "speed": num_tokens / x, "ratio": bare / x} for name, x in seconds.items()]
    print_table(f"{title}, {device_name(device)}", columns, rows)
    print(f"MFU of the bare forward: {mfu:.1%} of the measured matmul peak")


def compare_servers(
    config: PipelineConfig,
    options: argparse.Namespace,
    documents: Documents,
    captured: tuple[int, ...],
    layout: Layout,
) -> None:
    if options.cores and len(options.cores) != len(config.hidden_states.servers):
        raise UserError(f"--cores: must name {len(config.hidden_states.servers)} cores, one of each server")
    target, settings = Run(config).target, config.hidden_states

    def by(urls: list[str]) -> float:
        if options.cores:
            os.sched_setaffinity(0, {options.cores[settings.servers.index(url)] for url in urls})
        checked = captured, getattr(torch, settings.dtype.value), int(documents.lengths.max())
        with (
            tempfile.TemporaryDirectory(prefix="mtptrain-bench-") as name,
            ServerStreams(urls, target, *checked) as all_,
        ):
            return seconds_of(partial(fill_and_remove, Path(name), documents, all_, layout))

    def at_once() -> float:
        with ThreadPoolExecutor(len(settings.servers)) as pool:
            return seconds_of(lambda: [*pool.map(lambda url: by([url]), settings.servers)])

    apart, together = "each with a run of its own, at once", "one run"
    candidates = {url: partial(by, [url]) for url in settings.servers} | {apart: at_once}
    seconds = fastest(candidates | {together: partial(by, settings.servers)}, options.repeats)
    tokens = {name: len(documents.input_ids) * (len(settings.servers) if name == apart else 1) for name in seconds}
    speeds = {name: tokens[name] / each for name, each in seconds.items()}
    alone = sum(speeds[url] for url in settings.servers)
    rows = [
        {"name": name, "speed": speed, "ratio": speed / speeds[apart], "share": speed / alone}
        for name, speed in speeds.items()
    ]
    columns = {"servers": ("name", ""), "tokens/s": ("speed", ",.0f"), "vs. at once": ("ratio", ".3f")}
    columns["of the sum alone"] = ("share", ".3f")
    print_table(f"Extraction by servers, {config.target.path}, head {config.head.name}", columns, rows)


def random_8b(device: torch.device, dtype: torch.dtype) -> Target:
    with torch.device(device):
        return Target(AutoModelForCausalLM.from_config(llama_8b(32), dtype=dtype))


def random_documents(count: int, vocab_size: int) -> Documents:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(math.log(MEDIAN_TOKENS), 0.8, count)).clip(8, MAX_TOKENS).astype(int).tolist()
    return Documents.from_list([(i, rng.integers(0, vocab_size, n), np.ones(n)) for i, n in enumerate(lengths)])


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def bare_forward(target: Target, documents: Documents, batch_tokens: int) -> None:
    for batch in token_budget_batches(documents.lengths.tolist(), batch_tokens, target.form.keeps_states):
        forward_documents(target, [torch.from_numpy(documents.token_ids(i)) for i in batch])


@torch.inference_mode()
def plain_loop(target: Target, documents: Documents, layers: tuple[int, ...], directory: Path) -> None:
    """Extracts states in padded batches of eight, in the order of the documents, and saves a file per document."""
    ids = [torch.from_numpy(documents.token_ids(i)).long() for i in range(len(documents))]
    with target.attention("sdpa"), tempfile.TemporaryDirectory(dir=directory) as folder:
        for start in range(0, len(ids), PLAIN_BATCH):
            prompts = ids[start : start + PLAIN_BATCH]
            input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(target.device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
            output = target.model(input_ids=input_ids, attention_mask=mask.to(target.device), output_hidden_states=True)
            for row, prompt in enumerate(prompts):
                # A copy also on a CPU, because torch.save writes the whole storage of a view: here, the padded batch.
                states = [output.hidden_states[k][row, : len(prompt)].to("cpu", copy=True) for k in (*layers, -1)]
                torch.save({"input_ids": prompt, "hidden_states": states}, Path(folder) / f"{start + row}.pt")


def fill_and_remove(folder: Path, documents: Documents, streams: Streams, layout: Layout) -> None:
    """Writes a complete store of about four shards, as stage 2 does, and removes it."""
    hidden_size, num_captured, dtype = layout
    shard_tokens = max(1, len(documents.input_ids) // 4)
    shards = dict(enumerate(shard_ranges(documents.lengths, shard_tokens)))
    target = TargetIdentity("bench", None, "", "", "", "")
    identity = StoreIdentity(target, tuple(range(num_captured)), "", "", dtype=dtype.value)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directory = Path(name)
        begin_store(directory, identity, shard_tokens, list(shards))
        fill_shards(streams, documents, shards, directory, *layout, "", show=False)
        assert finish_store(directory, identity, shard_tokens, hidden_size, len(shards))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--8b", dest="is_8b", action="store_true", help="random weights with the sizes of an 8B Llama")
    parser.add_argument("--cores", type=int, nargs="+", help="the core of each of hidden_states.servers")
    parser.add_argument("--documents", type=positive, default=64, help="documents that are extracted")
    run_benchmark(main, parser)
