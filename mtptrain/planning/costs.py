"""What a run costs, counted without weights and without memory: the target by its config, a training step by running it on tensors
that have shapes but no data.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.meter import Meter
from mtptrain.target.frozen_parts import EMBED_TOKENS, FINAL_NORM, LM_HEAD, FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import fused_through


@dataclass(frozen=True)
class TargetCosts:
    """Of a forward of the target up to its final norm: extraction needs no logits."""

    num_parameters: int
    """Tied ones once."""
    active_parameters: int
    """Of the decoder layers, those that one token meets: k of E experts."""
    attention_flops: int
    """Of one token and each token that it sees."""
    traffic_bytes_per_token: int
    """That elementwise kernels of the decoder layers read and write in bf16."""

    def flops_per_token(self, document_tokens: float) -> float:
        """2 per active parameter, and causal attention: a token sees half of its document, on the average.

        Windows are not counted, so that this is an upper bound where layers have one.
        """
        return 2 * self.active_parameters + self.attention_flops * document_tokens / 2


def target_costs(config: PreTrainedConfig) -> TargetCosts:
    """Build the target on the meta device, which takes no memory, and count."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    used = config.num_experts_per_tok / num_experts if num_experts else 1.0
    layers = {name: size for name, size in sizes.items() if name not in (EMBED_TOKENS, LM_HEAD)}
    active = sum(size * (used if ".experts." in name else 1.0) for name, size in layers.items())
    query_dim = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or config.head_dim
    value_dim = getattr(config, "v_head_dim", None) or config.head_dim
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * (query_dim + value_dim)
    return TargetCosts(sum(sizes.values()), round(active), attention, _traffic_per_token(config, query_dim + value_dim))


def _traffic_per_token(config: PreTrainedConfig, head_dims: int) -> int:
    """In each layer two norms with their residual sums read and write four rows of the hidden size each, RoPE and the cache the heads,
    and the activation of the MLP reads two rows of the intermediate size and writes one; experts move their outputs once more."""
    experts = getattr(config, "num_experts_per_tok", 0) or 0
    width = config.moe_intermediate_size * experts if experts else config.intermediate_size
    values = 8 * config.hidden_size + 4 * config.num_attention_heads * head_dims + 3 * width + 2 * experts * config.hidden_size
    return 2 * config.num_hidden_layers * values


def head_parameters(config: HeadConfig, target_config: PreTrainedConfig) -> int:
    """Trained parameters of a head, built on the meta device.

    Raises:
        ValueError: the head does not fit the target.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_head(config, target_config).parameters())


@dataclass(frozen=True)
class StepCosts:
    """Of forward, loss and backward over one packed micro-batch."""

    flops: int
    """Of matrix products and attention: `mtptrain.training.flops.StepFlops` is their formula."""
    attention_flops: int
    """Those of attention to the depth-0 keys alone."""
    elementwise_bytes: int
    """Bytes that all other operators read and write."""
    peak_bytes: int
    """Most that is alive at once, gradients of the weights included, weights and frozen parts not."""


def step_costs(
    config: HeadConfig,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    lengths: Sequence[int],
    supervised_share: float,
    chunk_rows: int,
    activation_checkpointing: bool = False,
    compiled: bool = False,
) -> StepCosts:
    """Run the trainer's step on tensors without data, and count what it does: in bf16 with the kernels of a GPU.

    Args:
        lengths: tokens of each document in the micro-batch.
        supervised_share: of the tokens, those that teach.
        chunk_rows: `train.loss_chunk_rows`.
        activation_checkpointing: `train.activation_checkpointing`.
        compiled: `train.compile`: a fused function reads its arguments and writes its results, and nothing else. Memory is counted
            without it, an upper bound.
    """
    plain, held = _metered_step(config, target_config, dtype, lengths, supervised_share, chunk_rows, activation_checkpointing)
    traffic = plain
    if compiled:
        traffic, _ = _metered_step(
            config, target_config, dtype, lengths, supervised_share, chunk_rows, activation_checkpointing, is_fused=True
        )
    flops = plain.matmul_flops + plain.attention_flops
    return StepCosts(flops, plain.attention_flops, traffic.elementwise_bytes, plain.peak_bytes["cpu"] - held)


def _metered_step(
    config: HeadConfig,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    lengths: Sequence[int],
    supervised_share: float,
    chunk_rows: int,
    activation_checkpointing: bool,
    is_fused: bool = False,
) -> tuple[Meter, int]:
    """Returns the counts of a step, and the bytes of weights and frozen parts that its peak includes."""
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True), _DefaultDtype(dtype):
        head = build_head(config, target_config)
        head.activation_checkpointing = activation_checkpointing
        parts = _frozen_parts(target_config)
        meter.hold(*head.parameters(), parts.embed_tokens, parts.norm_weight, parts.lm_head)
        held = meter.peak_bytes["cpu"]
        with meter, fused_through(meter.fused) if is_fused else nullcontext():
            _step(head, parts, config.ttt_steps, target_config.hidden_size, lengths, supervised_share, chunk_rows)
    return meter, held


def _step(
    head: Head, parts: FrozenParts, depths: int, hidden_size: int, lengths: Sequence[int], supervised_share: float, chunk_rows: int
) -> None:
    """Run forward, loss and backward of one micro-batch whose documents end with their responses."""
    rows = [max(1, round((length - 1) * supervised_share)) for length in lengths]
    with unset_fake_temporarily():  # where documents lie is known, and attention's FLOPs are counted by it
        packing = Packing.of(
            lengths, [(i, length - 1 - count, count) for i, (length, count) in enumerate(zip(lengths, rows, strict=True))]
        )
    batch, scale = _batch(head, depths, hidden_size, packing), torch.empty(depths, dtype=torch.float32)
    clock = PhaseClock(torch.device("cpu"))
    losses = training_losses(head, parts, batch, scale, LossSettings(chunk_rows=chunk_rows), clock)
    del batch  # its memory is free during the backward pass
    losses.loss.backward()


def _batch(head: Head, depths: int, hidden_size: int, packing: Packing) -> Batch:
    """Returns a batch whose tensors have shapes but no data."""
    num_tokens, num_rows, num_captured = len(packing.positions), len(packing.rows), len(head.capture_layers)
    return Batch(
        hidden_states=torch.empty(num_tokens, hidden_size),
        aux_hidden_states=torch.empty(num_tokens, num_captured, hidden_size) if num_captured else None,
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
        config, {EMBED_TOKENS: torch.empty(table), FINAL_NORM: torch.empty(config.hidden_size), LM_HEAD: torch.empty(table)}
    )


class _DefaultDtype:
    """New floating-point tensors have this dtype: a module without data cannot be cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
