"""Tests the costs of a training step against hand-computed FLOPs and against the memory of a real step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtptrain.config import PipelineConfig
from mtptrain.heads import HEADS
from mtptrain.heads.attention import cpu_blocks
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.costs import MicroBatch, _packing, _step, step_costs
from mtptrain.planning.plan import make_plan
from mtptrain.planning.planner import plan_rows
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts


@pytest.mark.parametrize("packed", [False, True], ids=["spans", "single draft positions"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_step_of_blocks_costs_what_the_formula_says(packed: bool, num_layers: int, tiny_target: Path) -> None:
    """Attention in blocks computes its scores twice, and has two extra columns in two of its matmuls."""
    depths, length, vocab_size, drafts = 3, 65, 260, 11 if packed else None
    target_config = read_target_config(tiny_target)
    config = HEADS["dflash"].Config(
        ttt_steps=depths, capture_layers=[0, 1, 2], num_layers=num_layers, anchors_per_document=drafts
    )
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, 0.5, loss_chunk_rows=32))
    rows = drafts or 32
    packing = _packing([length] * 4, [32] * 4, drafts)
    head = build_head(config, target_config)
    flops = head.step_flops(vocab_size, depths)
    attention = head.layers[0].self_attn
    pairs = sum(  # a causal segment is one block of all pairs, with padded keys
        q * (-(-k // cpu_blocks.KEY_MULTIPLE) * cpu_blocks.KEY_MULTIPLE if part.is_causal else k)
        for part in packing.segments
        for q, k in part.lengths
    )
    num_queries = num_layers * (depths + 1) - 1
    inside = num_queries * (depths + 1) * attention.o_proj.in_features * 4 * rows
    # With single draft positions, the target's logits are computed again at each depth after the first.
    teachers = 2 * vocab_size * target_config.hidden_size * (depths - 1) * 4 * rows * packed
    expected = flops.per_token * 4 * length + flops.per_row * 4 * rows + 2 * inside + teachers
    expected += flops.per_pair * pairs * (14 + 8 / attention.head_dim) / 12
    assert costs.flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["mtp", "eagle", "eagle3", "medusa", "hydra"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_training_step_costs_what_the_formula_says(
    share: float, name: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares `Head.step_flops` with the operators that run.

    Attention computes its scores twice, so it runs 14 FLOPs where the formula has 12. Attention to prompts is
    computed in blocks, which have two extra columns in two matmuls.
    """
    monkeypatch.setattr(cpu_blocks, "SHORT_TOKENS", 0)  # use the flash kernel: blocks compute more than the causal half
    depths, length, vocab_size = 3, 65, 260
    target_config = read_target_config(tiny_target)
    settings = {"eagle3": {"capture_layers": [0, 1, 2]}, "medusa": {"num_layers": 2}, "hydra": {"num_layers": 2}}
    config = HEADS[name].Config(ttt_steps=depths, **settings.get(name, {}))
    rows = round((length - 1) * share)
    packing = Packing.of([length] * 4, [(i, length - 1 - rows, rows) for i in range(4)])
    head = build_head(config, target_config)
    flops = head.step_flops(vocab_size, depths)
    of_prompts = (14 + 8 / 64) / 12  # the head dim is 64
    pairs = sum(
        q * k * (14 / 12 / 2 if part.is_causal else of_prompts) for part in packing.segments for q, k in part.lengths
    )
    expected = flops.per_token * 4 * length + flops.per_row * 4 * rows + flops.per_pair * pairs
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, share, loss_chunk_rows=32))
    assert costs.flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_training_step_of_a_draft_model_costs_what_the_formula_says(
    share: float, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token passes through all layers, and each document has one token more than `length`.

    Flash attention computes its scores twice, so it runs 14 FLOPs where the formula has 12.
    """
    monkeypatch.setattr(cpu_blocks, "SHORT_TOKENS", 0)
    length, rows = 65, round(64 * share)
    target_config = read_target_config(tiny_target)
    config = HEADS["draft_model"].Config(num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=False)
    flops = build_head(config, target_config).step_flops(260, ttt_steps=1)
    layer = 4 * 64 * 64 + 3 * 64 * 80
    assert (flops.per_token, flops.per_row) == (6 * 2 * layer, 260 * 64 * 8)
    attention = flops.per_document_pair * 4 * (length + 1) ** 2 / 2 * 14 / 12
    expected = flops.per_token * 4 * (length + 1) + flops.per_row * 4 * rows + attention
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, share, loss_chunk_rows=32))
    assert costs.flops == pytest.approx(expected, rel=1e-9)


def test_a_draft_models_memory_in_serving_is_planned_beside_a_heads(
    config_for: Callable[..., PipelineConfig],
) -> None:
    sizes = (
        "head.num_hidden_layers=3",
        "head.hidden_size=128",
        "head.num_attention_heads=4",
        "head.intermediate_size=96",
    )
    config = config_for("head=draft_model", *sizes, "head.num_key_value_heads=2", "deepspeed=zero1")
    plan = make_plan(config)
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 96 + 2 * 128  # q and o, k and v, MLP, norms
    weights = 2 * (260 * 128 + 3 * layer + 128)
    assert plan.serving is not None and weights == 2 * plan.head_parameters
    assert plan.serving.startswith(
        f"{weights / 1e9:.3g} GB of weights and {2 * 3 * 2 * 2 * 32} bytes of keys and values"
    )
    assert plan.serving.endswith(
        "256 bytes; the target caches 512 bytes per token"
    )  # one kv head of 64 takes 256 bytes per layer; the target has two layers
    assert ("serving", plan.serving) in plan_rows(plan, config)
    assert make_plan(config_for()).serving is None


@pytest.mark.parametrize("lengths", [[2048], [100] * 20], ids=["one document", "twenty documents"])
def test_the_planned_activations_are_the_memory_that_a_step_takes(lengths: list[int], tiny_target: Path) -> None:
    """Compares the plan with the allocations that torch's profiler records for the same step on real tensors."""
    target_config = read_target_config(tiny_target)
    config = HEADS["mtp"].Config(ttt_steps=3)
    planned = step_costs(MicroBatch(config, target_config, torch.float32, lengths, 1.0, loss_chunk_rows=256)).peak_bytes
    head, parts = build_head(config, target_config), load_frozen_parts(tiny_target)
    with torch.profiler.profile(profile_memory=True) as profile:
        _step_with_data(head, parts, lengths)
    assert planned == pytest.approx(peak_of(profile), rel=0.1)


def _step_with_data(head: torch.nn.Module, parts: object, lengths: list[int]) -> None:
    torch.manual_seed(0)
    empty = torch.empty

    def filled(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype is torch.long:
            return torch.zeros(*size, dtype=dtype)
        return torch.ones(*size, dtype=dtype) if dtype is torch.bool else torch.randn(*size, dtype=dtype)

    torch.empty = filled  # type: ignore[assignment]
    try:
        _step(head, parts, 3, 64, lengths, 1.0, 256)  # type: ignore[arg-type]
    finally:
        torch.empty = empty


def peak_of(profile: torch.profiler.profile) -> int:
    """Returns the largest number of bytes that were allocated at the same time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
