"""Tests the formulas of a training step and of a target against real ones."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import tensor_bytes
from mtptrain.config import TrainConfig
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.costs import activation_bytes, cached_values, step_flops, target_costs
from mtptrain.settings.heads import NativeMtpConfig
from mtptrain.settings.loss import LossPart
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from mtptrain.training.batches import Batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from tests.conftest import FAMILIES
from tests.families import EXPERTS, SIZES
from tests.published_targets import PUBLISHED_TARGETS

LLAMA = AutoConfig.for_model(
    "llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    vocab_size=1000, num_hidden_layers=8, max_position_embeddings=4096,
)  # fmt: skip
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
    ("peagle", {}, KL),
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


def random_batch(head: Head, packing: Packing) -> Batch:
    num_tokens, num_drafts, captured = len(packing.positions), len(packing.draft_positions), len(head.capture_layers)
    return Batch(
        hidden_states=torch.randn(num_tokens, LLAMA.hidden_size),
        aux_hidden_states=torch.randn(num_tokens, captured, LLAMA.hidden_size) if captured else None,
        input_ids=torch.randint(LLAMA.vocab_size, (num_tokens,)),
        next_ids=torch.randint(LLAMA.vocab_size, (num_tokens,)),
        is_draft=torch.ones(head.ttt_steps, num_drafts, dtype=torch.bool),
        num_drafts=torch.full((head.ttt_steps,), float(num_drafts)),
        packing=packing,
        document_ids=(),
        document_tokens=num_tokens,
    )


def attention_flops(products: int, query: int, *shapes: Any, **_: Any) -> int:
    """Counts the dot products of a flash kernel of CPUs, whose query is the argument of this number."""
    size, (_, _, num_keys, _) = math.prod(shapes[query]), shapes[query + 1]
    is_causal = any(each is True for each in shapes)
    return products * 2 * size * num_keys // (2 if is_causal else 1)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.mark.parametrize(
    ("name", "settings", "mix"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_a_step_takes_the_flops_and_the_memory_of_the_formulas(
    name: str, settings: dict[str, Any], mix: dict[LossPart, float]
) -> None:
    """On a CPU, attention computes tiles, some of which are masked in part: up to 5 percent of these steps."""
    assert {name for name, *_ in (*FAST, *SLOW)} == set(HEADS)
    torch.manual_seed(0)
    head = build_head(HEADS[name].Config(ttt_steps=1 if name == "draft_model" else 3, **settings), LLAMA)
    loss, packing = LossSettings(mix, chunk_rows=256), pack(head, [400, 200])
    embed_tokens, lm_head = torch.randn(2, LLAMA.vocab_size, LLAMA.hidden_size)
    parts = FrozenParts(embed_tokens, torch.ones(LLAMA.hidden_size), lm_head, find_form(LLAMA))
    batch, clock = random_batch(head, packing), PhaseClock(torch.device("cpu"))

    def step() -> None:
        head.zero_grad()
        training_losses(head, parts, batch, torch.ones(head.ttt_steps), loss, clock).loss.backward()

    of_flash = {FLASH: partial(attention_flops, 2, 0), FLASH_BACKWARD: partial(attention_flops, 5, 1)}
    with FlopCounterMode(display=False, custom_mapping=of_flash) as counter:
        step()
    assert 0.94 < step_flops(head, LLAMA, loss).of(packing) / counter.get_total_flops() < 1.05
    head.zero_grad()
    held = sum(x.nbytes for x in (batch.hidden_states, batch.aux_hidden_states) if x is not None)
    measured, gradients = tensor_bytes(step, torch.device("cpu")) + held, sum(4 * x.numel() for x in head.parameters())
    planned = activation_bytes(head, LLAMA, packing, 4, loss, on_gpu=False)
    # The peak may be in the backward pass, when some gradients exist. The plan counts these apart.
    assert planned == pytest.approx(measured, rel=0.2) and planned + gradients > 0.9 * measured


def test_a_model_is_counted_and_its_cache_too() -> None:
    for name, (model_type, settings) in FAMILIES.items():
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1}
        sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 64, **settings}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), attn_implementation="sdpa")
        costs = target_costs(model.config)
        assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters()), name
        assert 0 < costs.active_parameters < costs.num_parameters, name
        cache = PositionCache(10)
        Target(model).forward(torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, -1), cache)
        kept = sum(tensor.numel() for tensors in (cache._keys, cache._values) for tensor in tensors.values())
        assert kept == 2 * 10 * cached_values(model.config), name


def test_a_token_meets_few_of_the_experts() -> None:
    """Qwen3-30B-A3B is published with 3.3 B active parameters, embeddings and lm_head included. Each expert of a head
    has three matrices, whose products a step computes three times: 6 FLOPs a value."""
    config = PUBLISHED_TARGETS["qwen3_30b_a3b"].config()
    tables = 2 * config.vocab_size * config.hidden_size
    assert target_costs(config).active_parameters + tables == pytest.approx(3.3e9, rel=0.02)
    packing, flops = Packing.of_spans([9], [(0, 0, 8)], None), {}
    for used in (2, 4):
        config = AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS, "num_experts_per_tok": used})
        with torch.device("meta"):
            head = build_head(NativeMtpConfig(ttt_steps=1), config)
        flops[used] = step_flops(head, config, LossSettings.of(TrainConfig())).of(packing)
    assert flops[4] - flops[2] == 6 * 9 * 2 * 3 * SIZES["hidden_size"] * EXPERTS["moe_intermediate_size"]
