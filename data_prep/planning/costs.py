"""What a run costs, counted without weights and without memory: the target by its config, a training step by running it on tensors
that have shapes but no data.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.head_files import build_head
from mtptrain.heads.base import Head, HeadConfig
from mtptrain.heads.packing import Packing
from mtptrain.losses import LossSettings, draft_losses
from mtptrain.target import EMBED_TOKENS, FINAL_NORM, LM_HEAD, FrozenParts

aten = torch.ops.aten


@dataclass(frozen=True)
class TargetCosts:
    """Of a forward of the target up to its final norm: extraction needs no logits."""

    num_parameters: int
    """Tied ones once."""
    active_parameters: int
    """Of the decoder layers, those that one token meets: k of E experts."""
    attention_flops: int
    """Of one token and each token that it sees."""

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
    return TargetCosts(sum(sizes.values()), round(active), attention)


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
    peak_bytes: int
    """Most that is alive at once, gradients of the weights included, weights and frozen parts not."""


def step_costs(
    config: HeadConfig,
    target_config: PreTrainedConfig,
    dtype: torch.dtype,
    lengths: Sequence[int],
    supervised_share: float,
    chunk_rows: int,
    recompute: bool = False,
) -> StepCosts:
    """Run the trainer's step on tensors without data, and count what it does.

    FLOPs are those of matrix products and attention: `mtptrain.flops.StepFlops` is their formula.

    Args:
        lengths: tokens of each document in the micro-batch.
        supervised_share: of the tokens, those that teach.
        chunk_rows: `train.loss_chunk_rows`.
        recompute: `train.recompute`.
    """
    memory = _PeakMemory()
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    with FakeTensorMode(), _DefaultDtype(dtype):
        head = build_head(config, target_config)
        head.recompute = recompute
        parts = _frozen_parts(target_config)
        with counter, memory:
            _step(head, parts, config.ttt_steps, target_config.hidden_size, lengths, supervised_share, chunk_rows)
    return StepCosts(counter.get_total_flops(), memory.peak_bytes)


def _step(
    head: Head, parts: FrozenParts, depths: int, hidden_size: int, lengths: Sequence[int], supervised_share: float, chunk_rows: int
) -> None:
    """As `Trainer.step` does it, for one micro-batch whose documents end with their answers."""
    rows = [max(1, round((length - 1) * supervised_share)) for length in lengths]
    packing = Packing.of(
        lengths, [(i, length - 1 - count, count) for i, (length, count) in enumerate(zip(lengths, rows, strict=True))]
    )
    num_tokens, num_rows = sum(lengths), sum(rows)
    target_states = parts.final_norm(torch.empty(num_tokens, hidden_size))  # [N, H]
    aux = torch.empty(num_tokens, len(head.capture_layers), hidden_size) if head.capture_layers else None  # [N, L, H]
    embeddings = parts.embed(torch.empty(num_tokens, dtype=torch.long))  # [N, H]
    states = head(target_states if aux is None else aux, embeddings, packing, depths)  # [T, M, H]
    sums = draft_losses(
        states,
        parts.lm_head if head.lm_head is None else head.lm_head.weight,
        target_states[packing.rows + 1],
        parts.logits,
        torch.empty(depths, num_rows, dtype=torch.bool),
        torch.empty(depths, dtype=torch.float32),
        LossSettings(chunk_rows=chunk_rows),
        head.draft_token_ids,
    )
    sums.loss.backward()


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


class _PeakMemory(TorchDispatchMode):
    """The bytes of all storages that operators make, as long as something holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self._alive_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self._alive_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
            weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self._alive_bytes -= num_bytes


def _forward_flops(query: Any, key: Any, value: Any, _dropout: float = 0.0, is_causal: bool = False, **__: Any) -> int:
    return sdpa_flop_count(query, key, value) // (2 if is_causal else 1)


def _backward_flops(
    grad: Any, query: Any, key: Any, value: Any, _out: Any, _lse: Any, _dropout: float = 0.0, is_causal: bool = False, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value) // (2 if is_causal else 1)


_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""Flash attention of CPUs, which torch's own counter leaves out."""
