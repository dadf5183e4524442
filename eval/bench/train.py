"""Compares the training step with an unoptimised implementation and with another trainer.

Also measures the step's MFU and the cost of prompts and long documents.

    python -m eval.bench.train recipe=quickstart
    python -m eval.bench.train recipe=quickstart bench.target=8b          # only our step, on a GPU
    make .venv-peer/.installed                                            # the other trainer, once

Documents have 512 tokens, except where prompts and long documents are measured, and in the steps of `bench.target`.
Tokens and states are random. A step is forward, loss, backward, clipping
and AdamW, in the precision of `deepspeed` (with bf16, fp32 master weights). Candidates take turns:

- *ours*: the trainer's step in its DeepSpeed engine; *eager*: the same without torch.compile;
- *plain*: the unoptimised implementation in eager mode, which runs every token at every depth over dense masks and
  keeps all logits;
- *peer*: EAGLE-3 of vLLM Speculators, eager on a CPU.

Memory is the peak size of the tensors that a step creates: activations, gradients and the optimizer's temporaries.
`bench.out=FILE` writes the figures as JSON.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mtptrain.command_line.program import run_program
from mtptrain.command_line.tables import wide_console
from mtptrain.config import BENCH, PipelineConfig
from mtptrain.settings.heads import DflashConfig, Eagle3Config, HeadConfig, MtpConfig
from mtptrain.settings.precision import train_dtype
from mtptrain.training.flops import matmul_peak
from mtptrain.utils.compile import eager
from mtptrain.utils.distributed import Ranks, device_name, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from .step_memory import tensor_bytes
from .train_steps import (
    GPU_TARGETS,
    GPU_VOCAB,
    Case,
    Ours,
    PeerProcess,
    Plain,
    Shape,
    case_of,
    fastest,
    target_of,
)

GPU_HEADS = (
    MtpConfig(ttt_steps=3),
    Eagle3Config(ttt_steps=7),
    Eagle3Config(ttt_steps=7, draft_vocab_size=32_000),
    DflashConfig(ttt_steps=15, num_layers=5, sliding_window=2048, anchors_per_document=512),  # as published
)
GPU_DOCUMENTS = ([8192] * 2, [0] * 2)
DOCUMENT_TOKENS = 512
TrainFigures = dict[str, Any]
"""Measurements by name; the unit is part of the name."""


def main(config: PipelineConfig) -> None:
    check(config)
    ranks = init_ranks(config.distributed_timeout_hours)
    config = replace(config, train=replace(config.train, compile=True, micro_batches_per_step=1))
    dtype = getattr(torch, train_dtype(config.deepspeed))
    peak = matmul_peak(ranks.device, dtype)
    figures: TrainFigures = {"device": device_name(ranks.device), "dtype": str(dtype), "matmul_tflops": peak / 1e12}
    if config.bench.target is not None:
        figures["gpu"] = [bench_gpu(config, ranks, peak, head) for head in GPU_HEADS]
    else:
        figures["steps"] = bench_steps(config, ranks, peak)
        figures |= bench_prompts(config, ranks)
        figures["lengths"] = bench_lengths(config, ranks, peak)
    print_tables(figures)
    if config.bench.out:
        write_json(Path(config.bench.out), {BENCH: "train", **figures})


def check(config: PipelineConfig) -> None:
    known = ", ".join(f"`{name}`" for name in GPU_TARGETS)
    if config.bench.target is not None and config.bench.target not in GPU_TARGETS:
        raise UserError(f"bench.target: must be one of {known} or left out, but is {config.bench.target!r}; correct it")
    if config.bench.target is not None and not torch.cuda.is_available():
        raise UserError(
            "bench.target: must be left out on a machine without a GPU, because its steps take hours on a CPU, but is "
            f"{config.bench.target}; leave it out"
        )
    if len(config.bench.prompt_sizes) != 2:
        raise UserError(
            "bench.prompt_sizes: must be two numbers, a hidden size and a vocabulary size, but is "
            f"{config.bench.prompt_sizes}; correct it"
        )
    for size in (*config.bench.hidden_sizes, config.bench.prompt_sizes[0]):
        if size % 64:
            raise UserError(
                "bench.hidden_sizes, bench.prompt_sizes: hidden sizes must be multiples of 64, the size of an "
                f"attention head, but one is {size}; choose a multiple"
            )


def bench_steps(config: PipelineConfig, ranks: Ranks, peak: float) -> list[TrainFigures]:
    """Measures our step, the plain one and the peer's at every size, with all tokens supervised."""
    has_peer = Path(config.bench.peer_python).exists()
    if not has_peer:
        print("*** THE PEER IS LEFT OUT: bench.peer_python must be a Python with speculators, but "
              f"{config.bench.peer_python} does not "
              "exist; run `make .venv-peer/.installed` ***")  # fmt: skip
    rows = []
    for hidden_size in config.bench.hidden_sizes:
        for num_tokens in config.bench.train_tokens:
            head, shape = Eagle3Config(ttt_steps=config.bench.depths), full_documents(num_tokens)
            case = case_of(hidden_size, config.bench.vocab_size, head)
            peer = PeerProcess(config, case, shape, ranks) if has_peer else None
            rows.append(
                {"hidden_size": hidden_size, "tokens": num_tokens} | in_turns(config, ranks, case, shape, peer, peak)
            )
            print(json.dumps(rows[-1]))
            if peer is not None:
                peer.close()
    return rows


def full_documents(num_tokens: int) -> Shape:
    lengths, remainder = [DOCUMENT_TOKENS] * (num_tokens // DOCUMENT_TOKENS), num_tokens % DOCUMENT_TOKENS
    if remainder:
        lengths.append(remainder)
    return lengths, [0] * len(lengths)


def in_turns(
    config: PipelineConfig, ranks: Ranks, case: Case, shape: Shape, peer: PeerProcess | None, peak: float
) -> TrainFigures:
    """Measures the speed and memory of all candidates on one batch."""
    candidates: dict[str, Callable[[], float]] = {}
    peaks: dict[str, int] = {}
    builders: dict[str, type[Ours]] = {"ours": Ours, "plain": Plain}
    flops = 0.0
    for name, builder in builders.items():
        built = builder(config, case, shape, ranks)
        flops = built.flops
        _, peaks[name] = with_peak(built.timed, ranks.device, repeats=1)
        candidates[name] = built.timed
    candidates["eager"] = eager()(candidates["ours"])
    if peer is not None:
        candidates["peer"] = peer.step
    best = fastest(candidates, config.bench.repeats)
    tokens = sum(shape[0])
    figures: TrainFigures = {
        "tokens_per_s": tokens / best["ours"],
        "eager_tokens_per_s": tokens / best["eager"],
        "plain_tokens_per_s": tokens / best["plain"],
        "mfu": flops / best["ours"] / peak,
        "peak_bytes": peaks["ours"],
        "plain_peak_bytes": peaks["plain"],
    }
    if peer is not None:
        figures |= {
            "peer_tokens_per_s": tokens / best["peer"],
            "ratio": best["peer"] / best["ours"],
            "peer_peak_bytes": peer.peak_bytes,
            "peak_share": peaks["ours"] / peer.peak_bytes,
        }
    return figures


def with_peak(step: Callable[[], float], device: torch.device, repeats: int) -> tuple[float, int]:
    """Returns the seconds of the fastest of `repeats` steps, and the peak tensor bytes of one more step.

    Three warm-up steps come first, because torch.compile may compile twice: for fixed shapes, then for dynamic ones.
    """
    for _ in range(3):
        step()
    return min(step() for _ in range(repeats)), tensor_bytes(step, device)


def bench_prompts(config: PipelineConfig, ranks: Ranks) -> TrainFigures:
    """Measures the cost of a prompt token relative to a supervised one, from steps with increasingly long prompts.

    Also compares ours with the peer for prompts nine times as long as the answers."""
    hidden_size, vocab_size = config.bench.prompt_sizes
    head, answer, documents = Eagle3Config(ttt_steps=config.bench.depths), 256, 2
    case = case_of(hidden_size, vocab_size, head)
    steps = {
        str(factor): Ours(
            config, case, ([answer * (1 + factor)] * documents, [answer * factor] * documents), ranks
        ).timed
        for factor in (0, 1, 3, 9)
    }
    curve = fastest(steps, config.bench.repeats)
    supervised = answer * documents
    figures: TrainFigures = {
        "prompt_curve": {f"prompts {factor} times the answers": seconds for factor, seconds in curve.items()},
        "prompt_token_cost": (curve["9"] - curve["0"]) / (9 * supervised) / (curve["0"] / supervised),
    }
    if Path(config.bench.peer_python).exists():
        case = case_of(config.bench.hidden_sizes[0], config.bench.vocab_size, head)
        shape = [1000] * 2, [900] * 2
        ours = Ours(config, case, shape, ranks)
        peer = PeerProcess(config, case, shape, ranks)
        best = fastest({"ours": ours.timed, "peer": peer.step}, config.bench.repeats)
        peer.close()
        figures |= {"prompts_ratio": best["peer"] / best["ours"], "prompts_tokens_per_s": 2000 / best["ours"]}
    return figures


def bench_lengths(config: PipelineConfig, ranks: Ranks, peak: float) -> list[TrainFigures]:
    """Measures a step on one document of each length, with the last 1,024 tokens supervised.

    Documents of up to a quarter of `bench.longest_tokens` are also measured with all tokens supervised, and with DFlash
    blocks at 512 of them."""
    measured, longest, depths = [], config.bench.longest_tokens, config.bench.depths
    lengths = [1024 << i for i in range(longest.bit_length()) if 1024 << i <= longest]
    short = [length for length in lengths[1:] if length <= longest // 4]
    steps: list[tuple[HeadConfig, int, int]] = [
        (Eagle3Config(ttt_steps=depths), length, supervised)
        for length, supervised in (*((length, 1024) for length in lengths), *((length, length) for length in short))
    ]
    steps += [(DflashConfig(ttt_steps=depths, anchors_per_document=512), length, length) for length in short]
    for head, length, supervised in steps:
        case = case_of(config.bench.hidden_sizes[0], config.bench.vocab_size, head)
        ours = Ours(config, case, ([length], [length - supervised]), ranks)
        seconds, num_bytes = with_peak(ours.timed, ranks.device, config.bench.repeats)
        figures: TrainFigures = {"head": head.name, "tokens": length, "supervised": supervised, "seconds": seconds}
        measured.append(figures | {"peak_bytes": num_bytes, "mfu": ours.flops / seconds / peak})
        print(json.dumps(measured[-1]))
    return measured


def bench_gpu(config: PipelineConfig, ranks: Ranks, peak: float, head: HeadConfig) -> TrainFigures:
    """Measures a step on packed documents of 8,192 tokens, all supervised."""
    assert config.bench.target is not None
    case = Case(head, target_of(GPU_TARGETS[config.bench.target], GPU_VOCAB))
    ours = Ours(config, case, GPU_DOCUMENTS, ranks)
    seconds, num_bytes = with_peak(ours.timed, ranks.device, config.bench.repeats)
    ours.trainer.clock.read()
    ours.timed()
    phases = ours.trainer.clock.read()
    return {
        "head": head.name,
        "depths": head.ttt_steps,
        "draft_vocab_size": getattr(head, "draft_vocab_size", None),
        "tokens_per_s": sum(GPU_DOCUMENTS[0]) / seconds,
        "peak_bytes": num_bytes,
        "mfu": ours.flops / seconds / peak,
        "optimizer_share": phases["optimizer"] / sum(phases.values()),
    }


STEP_COLUMNS = {
    "H": "hidden_size",
    "tokens": "tokens",
    "tokens/s": "tokens_per_s",
    "MFU": "mfu",
    "eager": "eager_tokens_per_s",
    "plain": "plain_tokens_per_s",
    "peer": "peer_tokens_per_s",
    "x peer": "ratio",
    "memory": "peak_bytes",
    "plain's": "plain_peak_bytes",
    "peer's": "peer_peak_bytes",
}
LENGTH_COLUMNS = {
    "head": "head",
    "tokens": "tokens",
    "supervised": "supervised",
    "s": "seconds",
    "MFU": "mfu",
    "memory": "peak_bytes",
}
GPU_COLUMNS = {
    "head": "head",
    "depths": "depths",
    "draft vocabulary": "draft_vocab_size",
    "tokens/s": "tokens_per_s",
    "MFU": "mfu",
    "optimizer": "optimizer_share",
    "memory": "peak_bytes",
}


def print_tables(figures: TrainFigures) -> None:
    console = wide_console(120)
    title = (
        f"Training step, {figures['device']}, matmul peak {figures['matmul_tflops']:.3g} TFLOP/s in {figures['dtype']}"
    )
    print_table(console, figures.get("steps"), STEP_COLUMNS, title)
    print_table(console, figures.get("lengths"), LENGTH_COLUMNS, "One document")
    print_table(console, figures.get("gpu"), GPU_COLUMNS, title)
    for name in ("prompt_token_cost", "prompts_ratio", "prompts_tokens_per_s"):
        if name in figures:
            console.print(f"{name.replace('_', ' ')}: {shown(name, figures[name])}")


def print_table(console: Console, rows: list[TrainFigures] | None, columns: dict[str, str], title: str) -> None:
    if rows:
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*(shown(key, row.get(key)) for key in columns.values()))
        console.print(table)


def shown(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 100 else f"{value:.3f}"
    if isinstance(value, int) and "bytes" in name:
        return f"{value / 1e6:,.0f} MB"
    return "" if value is None else str(value)


if __name__ == "__main__":
    run_program(main)
