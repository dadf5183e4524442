"""Compares the speed of extraction with that of a bare forward pass, and measures how fast hidden states are read.

- *bare forward*: the target over packed documents, without keeping states;
- *ours*: the transformers backend writing a store to disk, in bf16 and fp8;
- *plain loop*: padded batches of eight, `output_hidden_states=True` and `torch.save` of the head's inputs, as most
  scripts do;
- *vLLM*: the vLLM backend writing a store, if `serving.python` or `.venv-vllm` has vLLM and the target is not random;
- *reading*: packed training batches from disk, compared with a plain copy of the memory-mapped shards.

The candidates of each table take turns, except vLLM, which needs its own process and the GPU's memory. Torch uses one
thread, torchrun's default for each rank. The writer adds `hidden_states.writer_threads` threads and one that hashes
shards, and reading fp8 without decoding adds one that reads ahead. Extraction runs over documents of random tokens with
log-normal lengths; the stores of *reading* have documents of 2,048 tokens.

    python -m eval.bench.extraction recipe=quickstart
    python -m eval.bench.extraction recipe=quickstart bench.target=8b bench.documents=256     # on a GPU, random weights
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.command_line.program import run_program
from mtptrain.config import BENCH, BenchConfig, PipelineConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.fill import Streams
from mtptrain.hidden_states.extraction.transformers_streams import (
    TransformersStreams,
    forward_documents,
    token_budget_batches,
)
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.planning.costs import target_costs
from mtptrain.run import Run
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.training.batches import BatchSchedule
from mtptrain.training.flops import matmul_peak
from mtptrain.utils.distributed import init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from .random_data import random_documents, random_store, write_store
from .train_steps import GPU_TARGETS, GPU_VOCAB, fastest, target_of

PLAIN_BATCH = 8
READ_HIDDEN_SIZE = 4096
ExtractionFigures = dict[str, float]
"""Measurements by name; the unit is part of the name."""


def main(config: PipelineConfig) -> None:
    device = init_ranks(config.distributed_timeout_hours).device
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mtptrain-bench-") as directory:
        figures = bench_writing(config, device, Path(directory))
        gc.collect()  # vLLM needs the memory of the target
        torch.cuda.empty_cache()
        figures |= bench_vllm(config, Path(directory)) | bench_reading(config.bench, Path(directory))
    print_tables(config, device, figures)
    if config.bench.out:
        write_json(Path(config.bench.out), {BENCH: "extraction", **figures})


def bench_writing(config: PipelineConfig, device: torch.device, directory: Path) -> ExtractionFigures:
    """Returns tokens/s of all candidates but vLLM, and the MFU of the bare forward with the FLOPs of `TargetCosts`."""
    target = load_bench_target(config, device)
    documents = random_documents(config, target.config.vocab_size)
    layers = HEADS[config.head.name].resolve_capture_layers(config.head, target.config)
    streams = TransformersStreams(
        target,
        (*layers, target.config.num_hidden_layers),
        config.hidden_states.batch_tokens,
        config.hidden_states.compile,
    )
    candidates: dict[str, Callable[[], object]] = {
        "bare_forward": lambda: bare_forward(target, documents, config.hidden_states.batch_tokens),
        "ours": lambda: fill_store(streams, config, target.config, documents, directory, StoreDtype.bfloat16),
        "ours_fp8": lambda: fill_store(streams, config, target.config, documents, directory, StoreDtype.fp8),
        "plain_loop": lambda: plain_loop(target, documents, layers, directory),
    }
    seconds = seconds_of(candidates, config.bench.repeats, device)
    figures = {f"{name}_tokens_per_s": len(documents.input_ids) / value for name, value in seconds.items()}
    costs = target_costs(target.config)
    flops = sum(length * costs.flops_per_token(length) for length in documents.lengths.tolist())
    figures["mfu"] = flops / seconds["bare_forward"] / matmul_peak(device, target.parts.embed_tokens.dtype)
    return figures


def load_bench_target(config: PipelineConfig, device: torch.device) -> Target:
    dtype = getattr(torch, config.hidden_states.dtype.value)
    if config.bench.target is None:
        return load_target(Run(config).target.directory, dtype, device)
    if config.bench.target != "8b":
        raise UserError(
            f"bench.target: must be `8b` or left out for the recipe's target, but is {config.bench.target!r}; correct "
            "it or leave it out"
        )
    with torch.device(device):
        return Target(AutoModelForCausalLM.from_config(target_of(GPU_TARGETS["8b"], GPU_VOCAB, 32), dtype=dtype))


def seconds_of(candidates: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Returns the seconds of each candidate's fastest run."""

    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return fastest({name: partial(timed, run) for name, run in candidates.items()}, repeats)


def bare_forward(target: Target, documents: Documents, batch_tokens: int) -> None:
    for batch in token_budget_batches(documents.lengths.tolist(), batch_tokens, target.form.keeps_states):
        forward_documents(target, [torch.from_numpy(documents.token_ids(i)) for i in batch])


def fill_store(
    streams: Streams,
    config: PipelineConfig,
    target: PreTrainedConfig,
    documents: Documents,
    directory: Path,
    dtype: StoreDtype,
) -> None:
    """Writes a store of about four shards, which is removed."""
    num_captured = len(HEADS[config.head.name].resolve_capture_layers(config.head, target))
    shard_tokens, layout = max(1, len(documents.input_ids) // 4), (target.hidden_size, num_captured, dtype)
    with tempfile.TemporaryDirectory(dir=directory) as store:
        write_store(Path(store), streams, documents, shard_tokens, layout, config.hidden_states.writer_threads)


@torch.inference_mode()
def plain_loop(target: Target, documents: Documents, layers: tuple[int, ...], directory: Path) -> None:
    """Extracts states in padded batches of eight, in the order of the documents, and saves a file per document."""
    with target.attention("sdpa"), tempfile.TemporaryDirectory(dir=directory) as folder:
        for start in range(0, len(documents), PLAIN_BATCH):
            prompts = [
                torch.from_numpy(documents.token_ids(i)).long()
                for i in range(start, min(start + PLAIN_BATCH, len(documents)))
            ]
            input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(target.device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
            output = target.model(input_ids=input_ids, attention_mask=mask.to(target.device), output_hidden_states=True)
            for row, prompt in enumerate(prompts):
                # A copy also on a CPU, because torch.save writes the whole storage of a view: here, the padded batch.
                states = [output.hidden_states[k][row, : len(prompt)].to("cpu", copy=True) for k in (*layers, -1)]
                torch.save({"input_ids": prompt, "hidden_states": states}, Path(folder) / f"{start + row}.pt")


def bench_vllm(config: PipelineConfig, directory: Path) -> ExtractionFigures:
    """Returns tokens/s of the vLLM backend, excluding startup.

    There is no figure with random weights, without vLLM, or if vLLM cannot extract from the target.
    """
    if config.bench.target is not None:
        return {}
    target = Run(config).target
    documents = random_documents(config, target.config.vocab_size)
    layers = HEADS[config.head.name].resolve_capture_layers(config.head, target.config)
    try:
        with VllmStreams(
            target.directory,
            (*layers, int(target.config.num_hidden_layers)),
            config.hidden_states,
            int(documents.lengths.max()),
            directory / "scratch",
            local_rank=0,
            device_type="cuda" if torch.cuda.is_available() else "cpu",
            python=config.serving.python,
        ) as vllm:
            run = {"vllm": lambda: fill_store(vllm, config, target.config, documents, directory, StoreDtype.bfloat16)}
            seconds = seconds_of(run, config.bench.repeats, torch.device("cpu"))
    except UserError as refused:
        print(f"vLLM is left out: {refused}")
        return {}
    return {"vllm_tokens_per_s": len(documents.input_ids) / seconds["vllm"]}


def bench_reading(bench: BenchConfig, directory: Path) -> ExtractionFigures:
    """Returns GB/s of reading states as training does and of copying mapped shards.

    All GB/s count states as bf16, even for fp8 stores.
    """
    stores = {
        dtype: random_store(directory / dtype.value, dtype, bench.read_tokens, 2048, READ_HIDDEN_SIZE)
        for dtype in (StoreDtype.bfloat16, StoreDtype.fp8)
    }
    candidates: dict[str, Callable[[], object]] = {"mapped_copy": lambda: copy_mapped(stores[StoreDtype.bfloat16])}
    for dtype, store in stores.items():
        schedule = BatchSchedule(store, 3, 8192, 1, seed=0, for_gpu=False)
        candidates[f"batches_{dtype.value}"] = lambda schedule=schedule: read_batches(schedule)  # type: ignore[misc]
    undecoded = BatchSchedule(stores[StoreDtype.fp8], 3, 8192, 1, seed=0)
    candidates["batches_fp8_undecoded"] = lambda: read_batches(undecoded)
    seconds = seconds_of(candidates, bench.repeats, torch.device("cpu"))
    num_bytes = bench.read_tokens // 2048 * 2048 * READ_HIDDEN_SIZE * 2
    return {f"{name}_gb_per_s": num_bytes / value / 1e9 for name, value in seconds.items()}


def copy_mapped(store: HiddenStore) -> None:
    for first in range(0, store.num_documents, 4):
        documents = range(first, min(first + 4, store.num_documents))
        torch.cat([store.mapped_document(i).hidden_states for i in documents])


def read_batches(schedule: BatchSchedule) -> None:
    """Reads an epoch as training does, in batches of four documents, packed for three depths."""
    num_tokens = sum(batch.document_tokens for (batch,) in schedule.prefetch(0, schedule.steps_per_epoch, 0, 1))
    assert num_tokens == schedule.store.document_lengths.sum(), "an epoch must read the whole store"


def print_tables(config: PipelineConfig, device: torch.device, figures: ExtractionFigures) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one torch thread"
    target, dtype = config.bench.target or config.target.path, config.hidden_states.dtype
    titles = {
        ("tokens_per_s", "bare_forward"): f"Extraction, {target}, head {config.head.name}, {dtype}, {name}",
        ("gb_per_s", "mapped_copy"): f"Reading, {READ_HIDDEN_SIZE} dimensions, GB/s of bf16",
    }
    for (unit, reference), title in titles.items():
        table = Table("", unit, f"vs. {reference.replace('_', ' ')}", title=title)
        for key in (key for key in figures if key.endswith(unit)):
            ratio = figures[key] / figures[f"{reference}_{unit}"]
            table.add_row(key.removesuffix(f"_{unit}").replace("_", " "), f"{figures[key]:,.2f}", f"{ratio:.3f}")
        Console().print(table)
    print(f"MFU of the bare forward: {figures['mfu']:.1%} of the measured matmul peak")


if __name__ == "__main__":
    run_program(main)
