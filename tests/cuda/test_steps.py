"""Tests the trainer's step on fake CUDA tensors, with DeepSpeed, at the sizes of an 8B or a 70B target."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.config import LossPart, TrainConfig
from mtptrain.heads import HEADS
from mtptrain.planning.plan import Plan
from mtptrain.settings.loss import OWN_PARTS
from tests.cuda import guard
from tests.cuda.steps import DEVICE, NUM_RANKS, Rehearsed, become_rank_0_of_8, in_child, rehearse
from tests.published_targets import PUBLISHED_TARGETS
from tests.test_recipes import compose_recipe

LLAMA_8B, LLAMA_70B = "llama3_1_8b", "llama3_3_70b"
CHATS = [(1500, [(200, 500), (700, 800), (1100, 1500)]), (900, [(300, 900)]), (500, [(1, 100), (101, 490)])]
"""Documents of one to three answers, whose prompts provide only keys and values."""
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 32_000},
    "peagle": {"draft_vocab_size": 32_000},
    "dflash": {"num_layers": 2},
    "draft_model": {
        **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 8192, "tie_word_embeddings": True, "ttt_steps": 1},  # as Llama-3.2-1B
    },
}
OWN_LOSS: dict[str, Any] = {
    "dspark": {LossPart.data_ce: 0.1, LossPart.tv: 1.8, LossPart.confidence: 1.0},
    "dflash2": {LossPart.data_ce: 1.0, LossPart.selector: 1.0},
}
SLOW_HEADS = [pytest.param(name, marks=pytest.mark.slow) for name in HEADS if name != "mtp"]
DFLASH = [
    {"anchors_per_document": 64},
    {"anchors_per_document": 64, "num_layers": 3, "sliding_window": 256},
    {"num_layers": 2, "sliding_window": 256, "causal": "all", "sample_from_anchor": True},
]
LOSSES = [part for part in LossPart if part not in (LossPart.features, *OWN_PARTS)]


def rehearse_all(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Rehearsed]:
    """Runs in a child a step of each case: a head, its settings, and those of training."""
    become_rank_0_of_8()
    target = PUBLISHED_TARGETS[LLAMA_8B].config()
    return [
        rehearse(
            HEADS[name].Config(**{"ttt_steps": 5, **settings}),
            target,
            [CHATS],
            TrainConfig(compile=False, loss_chunk_rows=4096, **train),
        )
        for name, settings, train in cases
    ]


def check(step: Rehearsed) -> None:
    """Every gradient is there in bf16 on its device, the optimizer works in fp32, and the host never waited."""
    assert step.gradients.keys() == step.weights
    assert set(step.gradients.values()) == {(torch.bfloat16, DEVICE)}
    assert step.masters == {torch.float32}
    assert step.num_masters == pytest.approx(step.num_values / NUM_RANKS, rel=0.01)
    assert not step.syncs


@pytest.fixture(autouse=True)
def needs_fake_devices() -> None:
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")


@pytest.mark.parametrize("name", ["mtp", *SLOW_HEADS])
def test_a_step_over_chats_is_as_planned_and_never_waits(name: str) -> None:
    """The memory is as planned, with and without checkpointing, and so are the FLOPs, apart from those it repeats."""
    trains = [
        {"loss": OWN_LOSS.get(name, "kl"), "activation_checkpointing": checkpointing} for checkpointing in (False, True)
    ]
    steps = in_child(rehearse_all, [(name, SETTINGS.get(name, {}), train) for train in trains])
    for step in steps:
        check(step)
        assert step.peak_bytes - step.state_bytes == pytest.approx(step.planned_bytes, rel=0.13)
    assert steps[0].flops == pytest.approx(steps[0].planned_flops, rel=0.04)


@pytest.mark.slow
def test_variants_of_dflash_and_every_loss_give_every_gradient_and_never_wait() -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("dflash", settings, {}) for settings in DFLASH]
    for part in LOSSES:
        mix = {"loss": {part: 1.0, LossPart.features: 0.1}}
        cases += [("eagle3", {"ttt_steps": 3, "draft_vocab_size": size}, mix) for size in (None, 32_000)]
    for step in in_child(rehearse_all, cases):
        check(step)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "head", "stage"), [(LLAMA_8B, "mtp", 1), (LLAMA_70B, "eagle3", 2)])
def test_a_recipes_steps_take_the_memory_that_is_planned(target: str, head: str, stage: int, tmp_path: Path) -> None:
    """The memory planned for the target model during validation is subtracted, because these steps do not load it."""
    config, target_config = compose_recipe(f"{target}_{head}"), PUBLISHED_TARGETS[target].config()
    target_config.save_pretrained(tmp_path)
    config.target.path, config.run_dir = str(tmp_path), str(tmp_path / "run")
    memory, longest = Plan(config, free_bytes=0).memory, config.train.batch_tokens
    batches = [[(length, [(0, length)])] for length in (64, longest)]
    step = in_child(rehearse_recipe, config.head, target_config, batches, config.train, stage)
    check(step)
    assert f"optimizer (ZeRO {stage})" in memory
    planned = sum(memory.values()) - memory.get("target for validation", 0)
    assert planned == pytest.approx(step.peak_bytes, rel=0.1)


def rehearse_recipe(*args: Any) -> Rehearsed:
    become_rank_0_of_8()
    return rehearse(*args)
