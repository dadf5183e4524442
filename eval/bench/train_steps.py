"""Runs the steps that `eval.bench.train` measures: our trainer's, an unoptimised one, and that of vLLM Speculators."""

import json
import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from mtptrain.config import PipelineConfig
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.layer_head import LayerHead
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.planning.costs import step_flops
from mtptrain.settings.heads import HeadConfig
from mtptrain.settings.precision import train_dtype
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch, make_batch
from mtptrain.training.step_packing import Anchors
from mtptrain.training.trainer import Trainer
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError

GPU_TARGETS = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}
GPU_VOCAB = 128_256
WORKER = Path(__file__).with_name("speculators_worker.py")
Shape = tuple[Sequence[int], Sequence[int]]
"""Number of tokens in each document, and in each document's prompt."""


@dataclass(frozen=True)
class Case:
    """A head for a target with random weights."""

    head: HeadConfig
    target: LlamaConfig


def case_of(hidden_size: int, vocab_size: int, head: HeadConfig) -> Case:
    heads = hidden_size // 64
    sizes = {"hidden_size": hidden_size, "intermediate_size": hidden_size * 11 // 4, "num_attention_heads": heads}
    return Case(head, target_of(sizes | {"num_key_value_heads": math.gcd(heads, max(1, heads // 4))}, vocab_size))


def target_of(sizes: dict[str, Any], vocab_size: int, num_layers: int = 8) -> LlamaConfig:
    return LlamaConfig(
        **sizes,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    )


def fastest(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Returns the seconds of each candidate's fastest run.

    Candidates take turns, so that other load on the machine affects all of them.
    """
    best = dict.fromkeys(candidates, math.inf)
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            seconds = run()
            if turn:  # the first turn warms up
                best[name] = min(best[name], seconds)
    return best


class Ours:
    """The trainer's own step on a batch of random documents."""

    def __init__(self, config: PipelineConfig, case: Case, shape: Shape, ranks: Ranks) -> None:
        torch.manual_seed(0)
        target = case.target
        self.head = build_head(case.head, target)
        if self.head.d2t is not None:
            self.head.d2t.zero_()
        self.parts = random_parts(target, ranks.device, getattr(torch, train_dtype(config.deepspeed)))
        self.trainer = Trainer(self.head, self.parts, config.train, config.deepspeed, 10_000, ranks)
        self.device = ranks.device
        self.batch = random_batch(target, shape, self.head)
        self.flops = step_flops(case.head, target, self.trainer.loss_settings).of(self.batch.packing)

    def step(self) -> None:
        self.trainer.step([self.batch])

    def timed(self) -> float:
        """Runs a step and returns its duration in seconds."""
        started = time.perf_counter()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


class Plain(Ours):
    """An unoptimised step from the same initial weights, on the same batch.

    It computes all tokens at every depth, uses dense masks, keeps all logits, and weighs all depths equally.
    """

    def step(self) -> None:
        engine, batch = self.trainer.engine, self.batch.to(self.trainer.ranks.device, self.trainer.dtype)
        losses = plain_losses(engine.module, self.trainer.parts, batch)
        engine.backward(losses)
        engine.step()


def plain_losses(head: LayerHead, parts: FrozenParts, batch: Batch) -> torch.Tensor:
    """Computes the KL, averaged over the drafts of each depth and then over depths, directly from its definition."""
    attention, positions = head.self_attn, batch.packing.positions
    document = (positions == 0).cumsum(0)
    num_tokens = len(positions)
    target_states = parts.final_norm(batch.hidden_states)
    recycled = head.fuse(target_states if batch.aux_hidden_states is None else batch.aux_hidden_states)
    teacher = parts.logits(target_states).float().log_softmax(-1)  # [N, V]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=positions.device).tril()
    is_seen = (document[:, None] == document) & causal  # [N, N]
    keys, values, loss = [], [], torch.zeros((), device=positions.device)
    for depth in range(len(batch.is_draft)):
        read = torch.roll(batch.next_ids, -depth)
        residual, x = head.combine(recycled, parts.embed(read))
        query, key, value = attention.queries_keys_values(x, positions + depth)
        keys.append(key)
        values.append(value)
        attended = dense_attention(query, keys, values, is_seen)
        states, recycled = head.finish(residual, attention.o_proj(attended.flatten(-2)))
        logprobs = F.linear(states, parts.lm_head).float().log_softmax(-1)  # [N, V]
        wanted = torch.roll(teacher, -1 - depth, 0)
        is_draft = torch.zeros(num_tokens, device=positions.device).index_copy_(
            0, batch.packing.draft_positions, batch.is_draft[depth].float()
        )
        loss = loss + ((wanted.exp() * (wanted - logprobs)).sum(-1) * is_draft).sum() / is_draft.sum().clamp(min=1)
    return loss / len(batch.is_draft)


def dense_attention(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], is_seen: torch.Tensor
) -> torch.Tensor:
    """Computes attention at one depth directly from its definition, with one mask over all pairs of queries and keys.

    Args:
        query: [M, heads, head_dim].
        keys: the keys of depth 0 [N, key heads, head_dim], then each query's own keys at depths 1, 2, ..., each
            [M, key heads, head_dim].
        values: like `keys`.
        is_seen: bool[M, N], whether a query attends to a token.
    """
    itself = torch.eye(len(query), dtype=torch.bool, device=query.device)
    mask = torch.cat([is_seen, *[itself] * (len(keys) - 1)], dim=1)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, torch.cat(list(keys)), torch.cat(list(values))))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def random_parts(target: LlamaConfig, device: torch.device, dtype: torch.dtype) -> FrozenParts:
    table = (target.vocab_size, target.hidden_size)
    make = {"device": device, "dtype": dtype}
    scale = target.hidden_size**-0.5
    return FrozenParts(
        torch.randn(table, **make) * scale,  # type: ignore[call-overload]
        torch.ones(target.hidden_size, **make),  # type: ignore[call-overload]
        torch.randn(table, **make) * scale,  # type: ignore[call-overload]
        find_form(target),
    )


def random_batch(target: LlamaConfig, shape: Shape, head: Head) -> Batch:
    documents, num_captured = [], len(head.capture_layers)
    for index, (length, prompt) in enumerate(zip(*shape, strict=True)):
        states = torch.randn(length, 1 + num_captured, target.hidden_size, dtype=torch.bfloat16)
        ids = torch.randint(0, target.vocab_size, (length,), dtype=torch.int32)
        mask = (torch.arange(length) >= prompt).to(torch.uint8)
        documents.append(
            StoredDocument(
                index, ids, mask, states[:, -1].contiguous(), states[:, :-1].contiguous() if num_captured else None
            )
        )
    anchors = Anchors(head.drafts_per_document, (0,)) if head.drafts_per_document else None
    return make_batch(documents, head.ttt_steps, anchors=anchors, window=head.shared_window)


class PeerProcess:
    """Runs steps of vLLM Speculators in a separate process, which has its own packages and is idle between steps."""

    def __init__(self, config: PipelineConfig, case: Case, shape: Shape, ranks: Ranks) -> None:
        command = [config.bench.peer_python, str(WORKER)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        sizes = {name: getattr(case.target, name) for name in names}
        lengths, prompts = shape
        answer = self._ask(
            {
                "device": str(ranks.device),
                "autocasts": getattr(torch, train_dtype(config.deepspeed)) is torch.bfloat16,
                **sizes,
                "lengths": list(lengths),
                "prompts": list(prompts),
                "depths": case.head.ttt_steps,
            }
        )
        self.peak_bytes = int(answer["peak_bytes"])

    def step(self) -> float:
        """Runs a step and returns its duration in seconds by the peer's clock."""
        return float(self._ask({"steps": 1})["seconds"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # the peer has ended, and the missing answer is reported below
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            ended = self._process.wait()
            raise UserError(
                f"bench.peer_python: the peer must answer, but exited with {ended}; run {WORKER} "
                "with that Python; if it starts and waits for input, lower bench.hidden_sizes or bench.train_tokens"
            )
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
