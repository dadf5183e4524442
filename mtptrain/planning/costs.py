"""Counts the costs of a target and of a training step, without allocating weights."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.meter import Meter
from mtptrain.target.checkpoint_check import EMBED_TOKENS, FINAL_NORM, LM_HEAD
from mtptrain.target.families import head_dim
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import fused_through


@dataclass(frozen=True)
class TargetCosts:
    """The costs of the target's forward up to its final norm; extraction needs no logits."""

    num_parameters: int
    """Tied parameters count once."""
    active_parameters: int
    """Number of parameters of the decoder layers and the final norm that one token uses: only k of E experts."""
    attention_flops: int
    """FLOPs of attention for each pair of a query token and a key token, over all layers."""
    traffic_bytes_per_token: int
    """Bytes that elementwise kernels of the decoder layers read and write per token, in bf16."""

    def flops_per_token(self, document_tokens: float) -> float:
        """Returns 2 FLOPs per active parameter, plus causal attention over half a document on average.

        This ignores sliding windows, so it is an upper bound for layers that use them.
        """
        return 2 * self.active_parameters + self.attention_flops * document_tokens / 2


def target_costs(config: PreTrainedConfig) -> TargetCosts:
    """Returns the costs of a target. It is built on the meta device, so it takes no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    used = config.num_experts_per_tok / num_experts if num_experts else 1.0
    layers = {name: size for name, size in sizes.items() if name not in (EMBED_TOKENS, LM_HEAD)}
    active = sum(size * (used if ".experts." in name else 1.0) for name, size in layers.items())
    query_dim = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or head_dim(config)
    value_dim = getattr(config, "v_head_dim", None) or head_dim(config)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * (query_dim + value_dim)
    return TargetCosts(sum(sizes.values()), round(active), attention, _traffic_per_token(config, query_dim + value_dim))


def _traffic_per_token(config: PreTrainedConfig, head_dims: int) -> int:
    """Returns the bytes that elementwise kernels move per token.

    In each layer, two norms with their residual sums move four rows of the hidden size each. RoPE and the cache move
    four times the query and value sizes of all attention heads. The MLP's activation moves three rows of the
    intermediate size. With experts, their outputs are read and written one more time.
    """
    experts = getattr(config, "num_experts_per_tok", 0) or 0
    width = config.moe_intermediate_size * experts if experts else config.intermediate_size
    values = (
        8 * config.hidden_size
        + 4 * config.num_attention_heads * head_dims
        + 3 * width
        + 2 * experts * config.hidden_size
    )
    return 2 * config.num_hidden_layers * values


def head_parameters(config: HeadConfig, target_config: PreTrainedConfig) -> int:
    """Returns a head's number of trained parameters. The head is built on the meta device.

    Raises:
        UserError: the head does not fit the target.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_head(config, target_config).parameters())


@dataclass(frozen=True)
class StepCosts:
    """The costs of forward, loss and backward over one packed micro-batch."""

    flops: int
    """FLOPs of matmuls and attention as counted, with recomputation, which the formula `Head.step_flops` leaves out."""
    attention_flops: int
    """FLOPs of attention to the depth-0 keys."""
    elementwise_bytes: int
    """Bytes that all other operators read and write."""
    peak_bytes: int
    """Peak memory, including gradients but not the weights and frozen parts."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one GPU, and the settings of the step that trains on it."""

    head: HeadConfig
    target_config: PreTrainedConfig
    dtype: torch.dtype
    lengths: Sequence[int]
    """Number of tokens in each document."""
    supervised_share: float
    """Share of the tokens that are supervised."""
    loss_chunk_rows: int
    activation_checkpointing: bool = False


def step_costs(micro_batch: MicroBatch, is_compiled: bool = False) -> StepCosts:
    """Runs a training step on fake tensors, and returns its costs. In bf16, it runs the same code as on a GPU.

    Args:
        micro_batch: the documents and settings of the step.
        is_compiled: `train.compile`. If set, a fused function reads only its arguments and writes only its results.
            Memory is always counted without compilation, as an upper bound.
    """
    eager, weight_bytes = _metered_step(micro_batch)
    traffic = _metered_step(micro_batch, is_fused=True)[0] if is_compiled else eager
    flops = eager.matmul_flops + eager.attention_flops
    return StepCosts(flops, eager.attention_flops, traffic.elementwise_bytes, eager.peak_bytes["cpu"] - weight_bytes)


def _metered_step(micro_batch: MicroBatch, is_fused: bool = False) -> tuple[Meter, int]:
    """Returns the counts of a step, and the bytes of weights and frozen parts that its peak includes."""
    meter, target_config = Meter(), micro_batch.target_config
    with FakeTensorMode(allow_non_fake_inputs=True), _DefaultDtype(micro_batch.dtype):
        head = build_head(micro_batch.head, target_config)
        head.activation_checkpointing = micro_batch.activation_checkpointing
        parts = _frozen_parts(target_config)
        meter.hold(*head.parameters(), parts.embed_tokens, parts.norm_weight, parts.lm_head)
        weight_bytes = meter.peak_bytes["cpu"]
        with meter, fused_through(meter.fused) if is_fused else nullcontext():
            _step(
                head,
                parts,
                micro_batch.head.ttt_steps,
                target_config.hidden_size,
                micro_batch.lengths,
                micro_batch.supervised_share,
                micro_batch.loss_chunk_rows,
            )
    return meter, weight_bytes


def _step(
    head: Head,
    parts: FrozenParts,
    depths: int,
    hidden_size: int,
    lengths: Sequence[int],
    supervised_share: float,
    chunk_rows: int,
) -> None:
    """Run forward, loss and backward of one micro-batch whose documents end with their responses."""
    rows = [max(1, round((length - 1) * supervised_share)) for length in lengths]
    with unset_fake_temporarily():  # attention's FLOPs are counted from the real document positions
        packing = _packing(lengths, rows, head.drafts_per_document)
    batch, scale = _batch(head, depths, hidden_size, packing), torch.empty(depths, dtype=torch.float32)
    clock = PhaseClock(torch.device("cpu"))
    losses = training_losses(head, parts, batch, scale, LossSettings(chunk_rows=chunk_rows), clock)
    del batch  # its memory is free during the backward pass
    losses.loss.backward()


def _packing(lengths: Sequence[int], rows: Sequence[int], drafts_per_document: int | None) -> Packing:
    """Returns a packing whose draft positions are the `rows` tokens before the last one of each document.

    With `drafts_per_document`, at most that many of them, at equal distances, are draft positions.
    """
    if drafts_per_document is None:
        spans = [(i, length - 1 - count, count) for i, (length, count) in enumerate(zip(lengths, rows, strict=True))]
        return Packing.of(lengths, spans)
    counts = [min(count, drafts_per_document) for count in rows]
    return Packing.of_single(
        lengths,
        [
            length - 1 - count + np.arange(used) * count // used
            for length, count, used in zip(lengths, rows, counts, strict=True)
        ],
    )


def _batch(head: Head, depths: int, hidden_size: int, packing: Packing) -> Batch:
    """Returns a batch whose tensors have shapes but no data."""
    num_tokens, num_rows, num_captured = len(packing.positions), len(packing.rows), len(head.capture_layers)
    return Batch(
        hidden_states=torch.empty(num_tokens, hidden_size),
        aux_hidden_states=torch.empty(num_tokens, num_captured, hidden_size) if num_captured else None,
        input_ids=torch.empty(num_tokens, dtype=torch.long),
        next_ids=torch.empty(num_tokens, dtype=torch.long),
        is_draft=torch.empty(depths, num_rows, dtype=torch.bool),
        num_drafts=torch.empty(depths, dtype=torch.float32),
        packing=packing,
        document_ids=(),
        document_tokens=num_tokens,
    )


def _frozen_parts(config: PreTrainedConfig) -> FrozenParts:
    table = (config.vocab_size, config.hidden_size)
    return FrozenParts.of(
        config,
        {EMBED_TOKENS: torch.empty(table), FINAL_NORM: torch.empty(config.hidden_size), LM_HEAD: torch.empty(table)},
    )


class _DefaultDtype:
    """Sets the dtype of new floating-point tensors, because a module without data cannot be cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
