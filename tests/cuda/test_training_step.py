"""The trainer's step of every head on fake CUDA tensors, at the sizes of an 8B or a 70B target."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.config import LossPart, TrainConfig
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.planning.plan import Plan
from mtptrain.planning.step import activation_bytes, step_flops
from mtptrain.settings.loss import OWN_PARTS
from mtptrain.training.losses import LossSettings
from tests.cuda import guard
from tests.cuda.rehearsal import DEVICE, Rehearsal, answers, rehearse_step
from tests.published_targets import PUBLISHED_TARGETS
from tests.test_recipes import compose_recipe

LLAMA_8B, LLAMA_70B = "llama3_1_8b", "llama3_3_70b"
ONE_DOCUMENT = [answers(4096, [(0, 4096)])]
CHATS = [
    answers(1500, [(200, 500), (700, 800), (1100, 1500)]),
    answers(900, [(300, 900)]),
    answers(500, [(1, 100), (101, 490)]),
]
"""Documents of one to three answers, whose prompts provide only keys and values."""


LLAMA_1B: dict[str, object] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
"""The published sizes of Llama-3.2-1B."""
SETTINGS = {
    "eagle3": {"draft_vocab_size": 32_000},
    "peagle": {"draft_vocab_size": 32_000},
    "dflash": {"num_layers": 2},
    "draft_model": LLAMA_1B,
}
OWN_LOSS: dict[str, Any] = {
    "dspark": {LossPart.data_ce: 0.1, LossPart.tv: 1.8, LossPart.confidence: 1.0},
    "dflash2": {LossPart.data_ce: 1.0, LossPart.selector: 1.0},
}


def check(rehearsal: Rehearsal) -> None:
    """Every gradient is there in bf16 on its device, and the host never waited."""
    for name, weight in rehearsal.head.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.dtype, str(weight.grad.device)) == (torch.bfloat16, DEVICE), name
        assert weight.grad.shape == weight.shape, name
    assert not rehearsal.meter.syncs


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_step_over_chats_gives_every_gradient_and_never_waits(head: str, activation_checkpointing: bool) -> None:
    config = HEADS[head].Config(ttt_steps=1 if head == "draft_model" else 5, **SETTINGS.get(head, {}))
    train = TrainConfig(
        activation_checkpointing=activation_checkpointing,
        compile=False,
        loss_chunk_rows=4096,
        loss=OWN_LOSS.get(head, "kl"),
    )
    check(rehearse_step(config, PUBLISHED_TARGETS[LLAMA_8B].config(), CHATS, train))


@pytest.mark.parametrize(
    "head_settings",
    [
        {"anchors_per_document": 64},
        {"anchors_per_document": 64, "num_layers": 3, "sliding_window": 256},
        {"num_layers": 2, "sliding_window": 256, "causal": "all", "sample_from_anchor": True},
    ],
)
def test_a_step_of_every_variant_of_dflash_gives_every_gradient_and_never_waits(head_settings: dict[str, Any]) -> None:
    config = HEADS["dflash"].Config(ttt_steps=7, **head_settings)
    check(rehearse_step(config, PUBLISHED_TARGETS[LLAMA_8B].config(), CHATS, TrainConfig(compile=False)))


@pytest.mark.parametrize("kind", [part for part in LossPart if part not in (LossPart.features, *OWN_PARTS)])
@pytest.mark.parametrize("draft_vocab_size", [None, 32_000])
def test_every_loss_gives_every_gradient_and_never_waits(kind: LossPart, draft_vocab_size: int | None) -> None:
    config = HEADS["eagle3"].Config(ttt_steps=3, draft_vocab_size=draft_vocab_size)
    train = TrainConfig(loss={kind: 1.0, LossPart.features: 0.1}, compile=False)
    check(rehearse_step(config, PUBLISHED_TARGETS[LLAMA_8B].config(), CHATS[2:], train))


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize(
    ("head", "target", "settings"),
    [
        ("mtp", LLAMA_8B, {}),
        ("eagle3", LLAMA_70B, {"draft_vocab_size": 32_000}),
        ("peagle", LLAMA_8B, {}),
        ("medusa", LLAMA_8B, {}),
        ("hydra", LLAMA_70B, {}),
        ("dflash", LLAMA_8B, {"num_layers": 2}),
        ("dflash", LLAMA_8B, {"anchors_per_document": 512}),
        ("draft_model", LLAMA_8B, LLAMA_1B),
    ],
)
def test_the_planned_step_is_the_step_that_runs(
    head: str, target: str, settings: dict[str, int], activation_checkpointing: bool
) -> None:
    """FLOPs agree within 1 percent, and memory within 10, or within 13 with checkpointing.

    With checkpointing, the peak may be in the backward pass, when some gradients exist. The plan counts these apart.
    """
    config = HEADS[head].Config(ttt_steps=3, **settings)
    target_config, train = (
        PUBLISHED_TARGETS[target].config(),
        TrainConfig(activation_checkpointing=activation_checkpointing, compile=False, loss_chunk_rows=4096),
    )
    rehearsal = rehearse_step(config, target_config, ONE_DOCUMENT, train)
    with torch.device("meta"):
        planned = build_head(config, target_config)
    planned.activation_checkpointing = activation_checkpointing
    loss, packing, meter = LossSettings.of(train), rehearsal.batch.packing, rehearsal.meter
    weights, tolerance = sum(2 * x.numel() for x in rehearsal.head.parameters()), 0.1
    if activation_checkpointing:
        tolerance = 0.13
    else:
        flops = step_flops(planned, target_config, loss).of(packing)
        assert flops == pytest.approx(meter.matmul_flops + meter.attention_flops, rel=0.01)
    frozen = 2 * target_config.hidden_size * (2 * target_config.vocab_size + 1)
    measured = meter.peak_bytes[DEVICE] - weights - frozen
    planned_bytes = activation_bytes(planned, target_config, packing, 2, loss)
    assert (1 - tolerance) * measured < planned_bytes + activation_checkpointing * weights
    assert planned_bytes < (1 + tolerance) * measured


RECIPES_WITH_ZERO = [(LLAMA_8B, "mtp", 1), (LLAMA_70B, "eagle3", 2)]


@pytest.fixture(scope="module")
def zero_steps() -> list[dict[str, object]]:
    """What steps of these recipes took with DeepSpeed on eight ranks."""
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")
    cases = [f"{target},{head},zero{stage}" for target, head, stage in RECIPES_WITH_ZERO]
    result = subprocess.run(
        [sys.executable, "-m", "tests.cuda.zero_steps", *cases],
        env={**os.environ, "DS_ACCELERATOR": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "index", range(len(RECIPES_WITH_ZERO)), ids=[" ".join(map(str, case)) for case in RECIPES_WITH_ZERO]
)
def test_deepspeed_steps_take_the_memory_that_is_planned_and_never_wait(
    index: int, zero_steps: list[dict[str, object]], tmp_path: Path
) -> None:
    """The sizes are the recipe's own, and the memory includes gradients and optimizer state. The memory planned for the
    target model during validation is subtracted, because these steps do not load it."""
    (target, head, stage), step = RECIPES_WITH_ZERO[index], zero_steps[index]
    config = compose_recipe(f"{target}_{head}")
    PUBLISHED_TARGETS[target].config().save_pretrained(tmp_path)
    config.target.path, config.run_dir = str(tmp_path), str(tmp_path / "run")
    memory = Plan(config, free_bytes=0).memory
    assert f"optimizer (ZeRO {stage})" in memory and stage == step["stage"]
    assert step["syncs"] == {}
    assert step["masters"] == ["torch.float32"]
    assert step["master_values"] == pytest.approx(step["values"] / 8, rel=0.01)  # type: ignore[operator]
    planned = sum(memory.values()) - memory.get("target for validation", 0)
    assert planned == pytest.approx(step["peak_bytes"], rel=0.1)
