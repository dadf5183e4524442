"""Tests the costs of a training step against hand-computed FLOPs and against the memory of a real step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.config import PipelineConfig
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.planning.costs import MicroBatch, _packing, _step, step_costs, step_flops
from mtptrain.planning.plan import make_plan, micro_batch_costs
from mtptrain.planning.planner import plan_rows
from mtptrain.planning.workload import Workload
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.training.losses import LossSettings

LOSS = LossSettings(chunk_rows=64)

HEADS_AND_SETTINGS = [
    ("mtp", {}),
    ("eagle", {}),
    ("eagle3", {"capture_layers": [0, 1, 2], "draft_vocab_size": 40}),
    ("peagle", {"capture_layers": [0, 1, 2]}),
    ("medusa", {"num_layers": 2}),
    ("hydra", {"num_layers": 2}),
    ("dflash", {"capture_layers": [0, 1, 2]}),
    ("dflash", {"capture_layers": [0, 1, 2], "num_layers": 2, "anchors_per_document": 11}),
    ("dflash", {"capture_layers": [0, 1, 2], "anchors_per_document": 256}),
    ("dflash", {"capture_layers": [0, 1, 2], "num_layers": 2, "sliding_window": 12, "causal": "all"}),
    ("draft_model", {"num_hidden_layers": 2, "intermediate_size": 80}),
]


@pytest.mark.parametrize(("name", "settings"), HEADS_AND_SETTINGS, ids=str)
def test_the_flops_of_a_step_are_those_of_its_operators(
    name: str, settings: dict[str, object], tiny_target: Path
) -> None:
    """`step_flops` derives FLOPs from steps of one document each; this step has two documents."""
    target_config = read_target_config(tiny_target)
    config = HEADS[name].Config(ttt_steps=1 if name == "draft_model" else 3, **settings)
    lengths, share = [500, 500], 0.6
    counted = step_costs(MicroBatch(config, target_config, torch.bfloat16, lengths, share, LOSS)).flops
    counts = [round((length - 1) * share) for length in lengths]
    packing = _packing(lengths, counts, build_head(config, target_config))
    assert step_flops(config, target_config, LOSS).of(packing) == pytest.approx(counted, rel=0.01)


def test_layers_that_slide_count_the_tokens_of_their_window_alone(tiny_target: Path) -> None:
    """Attention is most of this step, and would be twice as much if every layer saw everything."""
    target_config = read_target_config(tiny_target)
    config = HEADS["dflash"].Config(ttt_steps=3, capture_layers=[1], num_layers=2, sliding_window=200)
    counted = step_costs(MicroBatch(config, target_config, torch.bfloat16, [3000], 0.6, LOSS)).flops
    packing = _packing([3000], [1799], build_head(config, target_config))
    flops = step_flops(config, target_config, LOSS)
    assert flops.of(packing) == pytest.approx(counted, rel=0.02)
    assert replace(flops, sliding_share=0.0).of(packing) > 1.3 * counted


def test_the_flops_of_an_mtp_head_are_those_of_its_weights(tiny_target: Path) -> None:
    """A weight costs 6 FLOPs per draft position: 2 in the forward pass, and 4 for the gradients of input and weight.

    lm_head is frozen, so it costs 4 at each depth, and 2 for the teacher. A pair of a query and a key costs two dot
    products in the forward and five in the backward pass.
    """
    target_config = read_target_config(tiny_target)
    flops = step_flops(HEADS["mtp"].Config(ttt_steps=3), target_config, LOSS)
    combine, queries, keys, rest = 2 * 64 * 64, 64 * 64, 2 * 64 * 64, 64 * 64 + 3 * 64 * 96
    assert flops.per_token == pytest.approx(6 * (combine + keys))
    per_draft_position = 6 * (3 * rest + queries + 2 * (combine + keys + queries)) + 260 * 64 * (3 * 4 + 2)
    assert flops.per_draft_position == pytest.approx(per_draft_position)
    assert flops.per_pair == pytest.approx(3 * 7 * 2 * 64, rel=0.01)


@pytest.mark.parametrize("head", [(), ("head=dflash", "head.capture_layers=[1,2]")], ids=["mtp", "dflash"])
def test_a_remainder_of_one_token_is_no_document_of_the_micro_batch(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, head: tuple[str, ...]
) -> None:
    target_config, workload = read_target_config(tiny_target), Workload(True, 10, 200, 200, 20, 20.0)
    whole, with_remainder = (
        micro_batch_costs(config_for(f"train.batch_tokens={size}", *head), target_config, 20, workload)
        for size in (60, 61)
    )
    assert with_remainder == whole and whole.peak_bytes > 0


def test_a_draft_models_memory_in_serving_is_planned(
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
    cached = 2 * 3 * 2 * 2 * 32
    assert plan.draft_model_bytes == (weights, cached) and weights == 2 * plan.head_parameters
    text = f"{weights / 1e9:.3g} GB of weights, and {cached} bytes of keys and values per token"
    assert ("serving", text) in plan_rows(plan, config)
    assert make_plan(config_for()).draft_model_bytes is None


@pytest.mark.parametrize("lengths", [[2048], [100] * 20], ids=["one document", "twenty documents"])
def test_the_planned_activations_are_the_memory_that_a_step_takes(
    lengths: list[int], tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the plan with the allocations that torch's profiler records for the same step on real tensors."""
    target_config = read_target_config(tiny_target)
    config = HEADS["mtp"].Config(ttt_steps=3)
    micro_batch = MicroBatch(config, target_config, torch.float32, lengths, 1.0, LossSettings(chunk_rows=256))
    planned = step_costs(micro_batch).peak_bytes
    head, parts = build_head(config, target_config), load_frozen_parts(tiny_target)
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", filled)
    with torch.profiler.profile(profile_memory=True) as profile:
        _step(head, parts, micro_batch)
    assert planned == pytest.approx(peak_of(profile), rel=0.1)


def filled(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor with data, in place of the empty ones of a planned step."""
    if dtype is torch.long:
        return torch.zeros(*size, dtype=dtype)
    return torch.ones(*size, dtype=dtype) if dtype is torch.bool else torch.randn(*size, dtype=dtype)


def peak_of(profile: torch.profiler.profile) -> int:
    """Returns the largest number of bytes that were allocated at the same time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
