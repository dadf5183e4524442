"""Measures the training step.

    python -m benchmarks.training_step recipe=quickstart
    python -m benchmarks.training_step recipe=quickstart --8b     # on a GPU, heads for an 8B Llama

A step is the trainer's own: forward, loss, backward, clipping and the optimizer on random tokens and states, in the
precision of `deepspeed` (with bf16, fp32 master weights) and with `train.compile`. In each group of rows, the
candidates take turns:

- documents of 512 tokens, all supervised, and two documents whose prompts are nine times as long as the answers;
- two answers without and with prompts, from which the cost of a prompt token follows;
- one document of increasing length, of which the last 1,024 or all tokens are supervised.

`--loss-blocks 1536 0` has a head for a target as narrow as Gemma 3 270M, with its vocabulary of 262,144, in blocks of
so many rows of logits; 0 chooses as in training. Their losses are beside them, and the CPU time of the process.

Memory is the peak size of the tensors that a step creates: activations, gradients and the optimizer's temporaries.
Every row is also printed as a line of JSON.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import LlamaConfig

from mtptrain.config import PipelineConfig
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.planning.costs import step_flops
from mtptrain.settings.heads import DflashConfig, Eagle3Config, HeadConfig, MtpConfig
from mtptrain.settings.precision import train_dtype
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch, make_batch
from mtptrain.training.flops import matmul_peak
from mtptrain.training.step_packing import Anchors
from mtptrain.training.trainer import Trainer
from mtptrain.utils.distributed import Ranks, device_name, init_ranks
from mtptrain.utils.errors import UserError

from .command import Row, fastest, llama_8b, positive, print_table, run_benchmark, tensor_bytes

HEADS_8B = (
    MtpConfig(ttt_steps=3),
    Eagle3Config(ttt_steps=7),
    Eagle3Config(ttt_steps=7, draft_vocab_size=32_000),
    DflashConfig(ttt_steps=15, num_layers=5, sliding_window=2048, anchors_per_document=512),  # as published
)
COLUMNS = {
    "": ("case", ""),
    "tokens": ("tokens", ",d"),
    "supervised": ("supervised", ",d"),
    "s": ("seconds", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "MFU": ("mfu", ".3f"),
    "optimizer": ("optimizer_share", ".3f"),
    "MB": ("megabytes", ",.0f"),
    "rows": ("chunk_rows", ",d"),
    "CPU s": ("cpu_seconds", ".3f"),
    "loss": ("loss", ".7f"),
}


@dataclass(frozen=True)
class Case:
    """A head for a target with random weights, and the documents of a step."""

    head: HeadConfig
    target: LlamaConfig
    documents: Sequence[tuple[int, int]]
    """Number of tokens in each document, and in its prompt."""
    chunk_rows: int | None = None
    """`train.loss_chunk_rows`, if it is compared."""

    def row(self, seconds: float, megabytes: float) -> Row:
        tokens = sum(length for length, _ in self.documents)
        own = getattr(self.head, "draft_vocab_size", None) or self.target.vocab_size
        return {
            "case": f"{self.head.name}, T {self.head.ttt_steps}, H {self.target.hidden_size:,}, V {own:,}",
            "documents": len(self.documents),
            "tokens": tokens,
            "supervised": tokens - sum(prompt for _, prompt in self.documents),
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "megabytes": megabytes,
        }


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    if options.is_8b and not torch.cuda.is_available():
        raise UserError("--8b: must be left out without a GPU, because its steps take hours on a CPU; leave it out")
    ranks, dtype = init_ranks(config.distributed_timeout_hours), getattr(torch, train_dtype(config.deepspeed))
    config = replace(config, train=replace(config.train, micro_batches_per_step=1))
    measure = partial(measure_cases, config, ranks, options.repeats)
    if options.loss_blocks:
        case = Case(MtpConfig(ttt_steps=3), gemma_270m(), [(272, 0)] * 2)
        rows = measure(*(replace(case, chunk_rows=rows) for rows in options.loss_blocks))
    elif options.is_8b:
        rows = [row for head in HEADS_8B for row in measure(Case(head, llama_8b(8), [(8192, 0)] * 2))]
    else:
        rows = rows_of_eagle3(measure, options)
    peak = matmul_peak(ranks.device, dtype) / 1e12
    print_table(f"Training step, {device_name(ranks.device)}, matmul peak {peak:.3g} TFLOP/s in {dtype}", COLUMNS, rows)


def rows_of_eagle3(measure: Callable[..., list[Row]], options: argparse.Namespace) -> list[Row]:
    head, smallest, rows = Eagle3Config(ttt_steps=3), options.hidden_sizes[0], list[Row]()
    compared = [(size, documents_of(tokens)) for size in options.hidden_sizes for tokens in options.tokens]
    for hidden_size, documents in (*compared, (smallest, [(1000, 900)] * 2)):
        rows += measure(Case(head, narrow_target(hidden_size), documents))
    target = narrow_target(options.hidden_sizes[-1], 32_000)
    answers, prompts = measure(*(Case(head, target, [document] * 2) for document in ((256, 0), (2560, 2304))))
    cost = (prompts["seconds"] / answers["seconds"] - 1) / 9
    print(f"A prompt token takes {cost:.1%} of the time of a supervised one.")
    rows += [answers, prompts]
    for length in (1024 << i for i in range(10) if 1024 << i <= options.longest_tokens):
        rows += measure(Case(head, narrow_target(smallest), [(length, length - 1024)]))
        if 1024 < length <= options.longest_tokens // 4:
            rows += measure(Case(head, narrow_target(smallest), [(length, 0)]))
    return rows


def documents_of(num_tokens: int) -> list[tuple[int, int]]:
    """Returns documents of 512 tokens and a shorter last one, all supervised."""
    lengths = [512] * (num_tokens // 512) + [num_tokens % 512] * (num_tokens % 512 > 0)
    return [(length, 0) for length in lengths]


def narrow_target(hidden_size: int, vocab_size: int = 4096) -> LlamaConfig:
    """Returns a target with attention heads of 64, of which four share a key head, and MLPs 2.75 times as wide."""
    heads = hidden_size // 64
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, max(1, heads // 4)),
        vocab_size=vocab_size,
        max_position_embeddings=131_072,
    )


def gemma_270m() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262_144,
        max_position_embeddings=32_768,
    )


def measure_cases(config: PipelineConfig, ranks: Ranks, repeats: int, *cases: Case) -> list[Row]:
    steps = [MeasuredStep(config, ranks, case) for case in cases]
    best = fastest({str(i): step.seconds for i, step in enumerate(steps)}, repeats)
    rows = [step.row(seconds) for step, seconds in zip(steps, best.values(), strict=True)]
    print(*map(json.dumps, rows), sep="\n", flush=True)
    return rows


class MeasuredStep:
    def __init__(self, config: PipelineConfig, ranks: Ranks, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.device, head = case, ranks.device, build_head(case.head, case.target)
        if head.d2t is not None:
            head.d2t.zero_()
        self.dtype = getattr(torch, train_dtype(config.deepspeed))
        parts = random_parts(case.target, self.device, self.dtype)
        settings = config.train if case.chunk_rows is None else replace(config.train, loss_chunk_rows=case.chunk_rows)
        self.trainer = Trainer(head, parts, settings, config.deepspeed, 10_000, ranks)
        self.batch = random_batch(case, head)
        self.cpu_seconds, self.loss = math.inf, float(self.trainer.step([self.batch]).sums[0].sum())
        for _ in range(2):  # torch.compile may compile twice: for fixed shapes, then for dynamic ones
            self.seconds()
        self.megabytes = tensor_bytes(self.seconds, self.device) / 1e6
        self.trainer.clock.read()  # forgets these steps

    def seconds(self) -> float:
        started, cpu_started = time.perf_counter(), time.process_time()
        self.trainer.step([self.batch])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.cpu_seconds = min(self.cpu_seconds, time.process_time() - cpu_started)
        return time.perf_counter() - started

    def row(self, seconds: float) -> Row:
        flops = step_flops(self.trainer.engine.module, self.case.target, self.trainer.loss_settings).of(
            self.batch.packing
        )
        phases = self.trainer.clock.read()
        more: Row = {"mfu": flops / seconds / matmul_peak(self.device, self.dtype)}
        more["optimizer_share"] = phases["optimizer"] / sum(phases.values())
        if self.case.chunk_rows is not None:
            more |= {"chunk_rows": self.case.chunk_rows, "cpu_seconds": self.cpu_seconds, "loss": self.loss}
        return self.case.row(seconds, self.megabytes) | more


def random_parts(target: LlamaConfig, device: torch.device, dtype: torch.dtype) -> FrozenParts:
    table, scale = (target.vocab_size, target.hidden_size), target.hidden_size**-0.5
    embed_tokens, lm_head = (torch.randn(table, device=device, dtype=dtype) * scale for _ in range(2))
    norm_weight = torch.ones(target.hidden_size, device=device, dtype=dtype)
    return FrozenParts(embed_tokens, norm_weight, lm_head, find_form(target))


def random_batch(case: Case, head: Head) -> Batch:
    stored, num_captured = [], len(head.capture_layers)
    for index, (length, prompt) in enumerate(case.documents):
        states = torch.randn(length, 1 + num_captured, case.target.hidden_size, dtype=torch.bfloat16)
        ids = torch.randint(0, case.target.vocab_size, (length,), dtype=torch.int32)
        mask = (torch.arange(length) >= prompt).to(torch.uint8)
        captured = states[:, :-1].contiguous() if num_captured else None
        stored.append(StoredDocument(index, ids, mask, states[:, -1].contiguous(), captured))
    anchors = Anchors(head.drafts_per_document, (0,)) if head.drafts_per_document else None
    return make_batch(stored, head.ttt_steps, anchors=anchors, window=head.shared_window)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--8b", dest="is_8b", action="store_true", help="measure heads for an 8B Llama, on a GPU")
    parser.add_argument("--loss-blocks", type=int, nargs="+", default=[], help="rows of blocks of logits to compare")
    parser.add_argument("--hidden-sizes", type=positive, nargs="+", default=[256, 512, 1024], help="multiples of 64")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 4096], help="tokens of a supervised step")
    parser.add_argument("--longest-tokens", type=positive, default=32_768, help="tokens of the longest document")
    run_benchmark(main, parser)
