"""Tests the formulas of a training step against the operators of a real one."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.step import activation_bytes, step_flops
from mtptrain.settings.loss import LossPart
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from tests.cuda.meter import Meter

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1000, "num_hidden_layers": 8, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA = AutoConfig.for_model("llama", **SIZES)
KL, ALL_DEPTHS = {LossPart.kl: 1.0}, {LossPart.e2e: 1.0}
FAST = [
    ("mtp", {}, KL),
    ("medusa", {"num_layers": 2}, KL),
    ("dflash", {"num_layers": 2, "sliding_window": 12, "causal": "all", "anchors_per_document": 80}, ALL_DEPTHS),
    ("hydra", {"num_layers": 2}, KL),
]
SLOW = [
    ("draft_model", {"num_hidden_layers": 2, "tie_word_embeddings": True}, KL),
    ("eagle", {}, ALL_DEPTHS),
    ("eagle3", {"draft_vocab_size": 500}, ALL_DEPTHS),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True}, KL),
    ("peagle", {}, KL),
    ("dflash", {"num_layers": 2}, KL),
    ("dspark", {}, {LossPart.tv: 1.0, LossPart.confidence: 1.0}),
    ("dflash2", {"num_layers": 2}, KL),
    ("native_mtp", {}, KL),
]


def pack(head: Head, lengths: list[int]) -> Packing:
    """Packs documents whose second halves are supervised."""
    if head.drafts_per_document is None:
        spans = [(i, length // 2, length - length // 2 - 1) for i, length in enumerate(lengths)]
        return Packing.of_spans(lengths, spans, head.shared_window)
    points = [np.linspace(length // 2, length - 2, head.drafts_per_document).astype(int) for length in lengths]
    return Packing.of_points(lengths, points, head.shared_window)


def run_step(head: Head, target_config: PreTrainedConfig, packing: Packing, loss: LossSettings) -> tuple[Meter, int]:
    """Runs forward, loss and backward on random data; returns the meter, and the bytes held before."""
    num_tokens, num_drafts = len(packing.positions), len(packing.draft_positions)
    hidden_size, vocab_size, captured = target_config.hidden_size, target_config.vocab_size, len(head.capture_layers)
    embed_tokens, lm_head = torch.randn(2, vocab_size, hidden_size)
    parts = FrozenParts(embed_tokens, torch.ones(hidden_size), lm_head, find_form(target_config))
    batch = Batch(
        hidden_states=torch.randn(num_tokens, hidden_size),
        aux_hidden_states=torch.randn(num_tokens, captured, hidden_size) if captured else None,
        input_ids=torch.randint(vocab_size, (num_tokens,)),
        next_ids=torch.randint(vocab_size, (num_tokens,)),
        is_draft=torch.ones(head.ttt_steps, num_drafts, dtype=torch.bool),
        num_drafts=torch.full((head.ttt_steps,), float(num_drafts)),
        packing=packing,
        document_ids=(),
        document_tokens=num_tokens,
    )
    meter, clock = Meter(), PhaseClock(torch.device("cpu"))
    meter.hold(*head.parameters(), *head.buffers(), embed_tokens, lm_head)
    held = meter.peak_bytes["cpu"]
    meter.hold(batch.hidden_states, *([] if batch.aux_hidden_states is None else [batch.aux_hidden_states]))
    with meter:
        training_losses(head, parts, batch, torch.ones(head.ttt_steps), loss, clock).loss.backward()
    return meter, held


@pytest.mark.parametrize(
    ("name", "settings", "mix"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_a_step_takes_the_flops_and_the_memory_of_the_formulas(
    name: str, settings: dict[str, Any], mix: dict[LossPart, float]
) -> None:
    """On a CPU, attention computes tiles, some of which are masked in part: up to 5 percent of these steps.

    The peak may be in the backward pass, when some gradients exist. The plan counts these apart.
    """
    assert {name for name, *_ in (*FAST, *SLOW)} == set(HEADS)
    head, loss = build(name, LLAMA, **settings), LossSettings(mix, chunk_rows=256)
    packing = pack(head, [400, 200])
    meter, held = run_step(head, LLAMA, packing, loss)
    flops = step_flops(head, LLAMA, loss).of(packing) / (meter.matmul_flops + meter.attention_flops)
    assert 0.94 < flops < 1.005
    planned, gradients = activation_bytes(head, LLAMA, packing, 4, loss), sum(4 * x.numel() for x in head.parameters())
    measured = meter.peak_bytes["cpu"] - held
    assert planned == pytest.approx(measured, rel=0.1) and planned + gradients > measured


def build(name: str, target_config: PreTrainedConfig, **settings: Any) -> Head:
    torch.manual_seed(0)
    return build_head(HEADS[name].Config(ttt_steps=1 if name == "draft_model" else 3, **settings), target_config)
