"""Counts the costs of a target and of a training step, without allocating weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedConfig

from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.meter import Meter
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.families import head_dim, routed_experts
from mtptrain.target.form import build_on_meta, find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.flops import StepFlops, packed_sizes
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import eager

COUNTED_STEPS = ((1024, 1.0), (512, 0.25), (1024, 1 / 16))
"""Number of tokens and supervised share of the steps from which `step_flops` derives those of all others. With two of
them, their numbers of tokens and draft positions might be proportional."""


@dataclass(frozen=True)
class TargetCosts:
    """The costs of the target's forward up to its final norm; extraction needs no logits."""

    num_parameters: int
    """Tied parameters count once."""
    active_parameters: int
    """Number of parameters of the decoder layers and the final norm that one token uses: only k of E experts."""
    attention_flops: int
    """FLOPs of attention for each pair of a query token and a key token, over all layers."""

    def flops_per_token(self, document_tokens: float) -> float:
        """Returns 2 FLOPs per active parameter, plus causal attention over half a document on average.

        This counts attention to all earlier tokens in every layer: an upper bound for layers with a sliding window, or
        without attention.
        """
        return 2 * self.active_parameters + self.attention_flops * document_tokens / 2


def target_costs(config: PreTrainedConfig) -> TargetCosts:
    """Returns the costs of a target. It is built on the meta device, so it takes no memory."""
    model, form = build_on_meta(config), find_form(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_used, num_experts = routed_experts(config)
    used = num_used / num_experts
    layers = {name: size for name, size in sizes.items() if not name.startswith((form.embed_tokens, form.lm_head))}
    active = sum(size * (used if ".experts." in name else 1.0) for name, size in layers.items())
    query_dim = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or head_dim(config)
    value_dim = getattr(config, "v_head_dim", None) or head_dim(config)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * (query_dim + value_dim)
    return TargetCosts(sum(sizes.values()), round(active), attention)


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
    """FLOPs of matmuls and attention."""
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
    loss: LossSettings
    activation_checkpointing: bool = False


def step_costs(micro_batch: MicroBatch) -> StepCosts:
    """Runs a training step on fake tensors, and returns its costs. In bf16, it runs the same code as on a GPU.

    Memory is counted without compilation, as an upper bound.
    """
    meter, _, _, weight_bytes = _metered_step(micro_batch)
    return StepCosts(meter.matmul_flops + meter.attention_flops, meter.peak_bytes["cpu"] - weight_bytes)


def step_flops(config: HeadConfig, target_config: PreTrainedConfig, loss: LossSettings) -> StepFlops:
    """Returns the FLOPs of a training step over any packing, derived from three steps on fake tensors.

    The FLOPs of matmuls are linear in the numbers of tokens and draft positions. Those of attention are linear in the
    pairs of a token and a draft position, or of two tokens, that see each other. Activation checkpointing, which
    recomputes, does not count.
    """
    sizes, matmuls, attention, sliding_share = [], [], [], 0.0
    one_block = replace(loss, chunk_rows=2**20)  # takes the fewest operators
    for length, share in COUNTED_STEPS:
        micro_batch = MicroBatch(config, target_config, torch.bfloat16, [length], share, one_block)
        meter, head, packing, _ = _metered_step(micro_batch)
        sliding_share = head.sliding_share
        sizes.append(packed_sizes(packing, sliding_share))
        matmuls.append(meter.matmul_flops)
        attention.append(meter.attention_flops)
    tokens_and_drafts, pairs = np.split(np.array(sizes), 2, axis=1)
    per_token, per_draft_position = np.linalg.lstsq(tokens_and_drafts, np.array(matmuls))[0]
    per_pair, per_document_pair = np.linalg.lstsq(pairs, np.array(attention))[0]
    return StepFlops(per_token, per_draft_position, per_pair, per_document_pair, sliding_share)


def _metered_step(micro_batch: MicroBatch) -> tuple[Meter, Head, Packing, int]:
    """Runs a step on fake tensors.

    Returns:
        The counts of the step, the head, the packing, and the bytes of weights and frozen parts that the peak includes.
    """
    meter, target_config = Meter(), micro_batch.target_config
    with FakeTensorMode(allow_non_fake_inputs=True), _default_dtype(micro_batch.dtype), eager():
        head = build_head(micro_batch.head, target_config)
        head.activation_checkpointing = micro_batch.activation_checkpointing
        parts = _frozen_parts(target_config)
        meter.hold(*head.parameters(), parts.embed_tokens, parts.norm_weight, parts.lm_head)
        weight_bytes = meter.peak_bytes["cpu"]
        with meter:
            packing = _step(head, parts, micro_batch)
    return meter, head, packing, weight_bytes


def _step(head: Head, parts: FrozenParts, micro_batch: MicroBatch) -> Packing:
    """Run forward, loss and backward of a micro-batch whose documents end with their responses; return its packing."""
    lengths, depths = micro_batch.lengths, micro_batch.head.ttt_steps
    counts = [max(1, round((length - 1) * micro_batch.supervised_share)) for length in lengths]
    with unset_fake_temporarily():  # attention's FLOPs are counted from the real document positions
        packing = _packing(lengths, counts, head)
    batch = _batch(head, depths, micro_batch.target_config.hidden_size, packing)
    scale, clock = torch.empty(depths, dtype=torch.float32), PhaseClock(torch.device("cpu"))
    losses = training_losses(head, parts, batch, scale, micro_batch.loss, clock)
    del batch  # its memory is free during the backward pass
    losses.loss.backward()
    return packing


def _packing(lengths: Sequence[int], counts: Sequence[int], head: Head) -> Packing:
    """Returns a packing whose draft positions are the tokens before the last one of each document, `counts` of them.

    With `Head.drafts_per_document`, at most that many of them, at equal distances, are draft positions.
    """
    if head.drafts_per_document is None:
        spans = [(i, length - 1 - count, count) for i, (length, count) in enumerate(zip(lengths, counts, strict=True))]
        return Packing.of_spans(lengths, spans, head.shared_window)
    drawn = [min(count, head.drafts_per_document) for count in counts]
    return Packing.of_points(
        lengths,
        [
            length - 1 - count + np.arange(used) * count // used
            for length, count, used in zip(lengths, counts, drawn, strict=True)
        ],
        head.shared_window,
    )


def _batch(head: Head, depths: int, hidden_size: int, packing: Packing) -> Batch:
    """Returns a batch whose tensors have shapes but no data."""
    num_tokens, num_captured = len(packing.positions), len(head.capture_layers)
    return Batch(
        hidden_states=torch.empty(num_tokens, hidden_size),
        aux_hidden_states=torch.empty(num_tokens, num_captured, hidden_size) if num_captured else None,
        input_ids=torch.empty(num_tokens, dtype=torch.long),
        next_ids=torch.empty(num_tokens, dtype=torch.long),
        is_draft=torch.empty(depths, len(packing.draft_positions), dtype=torch.bool),
        num_drafts=torch.empty(depths, dtype=torch.float32),
        packing=packing,
        document_ids=(),
        document_tokens=num_tokens,
    )


def _frozen_parts(config: PreTrainedConfig) -> FrozenParts:
    table = (config.vocab_size, config.hidden_size)
    return FrozenParts(torch.empty(table), torch.empty(config.hidden_size), torch.empty(table), find_form(config))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the dtype of new floating-point tensors, because a module without data cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
