"""Tests the trainer's step on fake CUDA tensors, with DeepSpeed, at the sizes of an 8B target."""

from typing import Any

import pytest
import torch

from mtptrain.config import TrainConfig
from mtptrain.heads import HEADS
from tests.cuda import guard
from tests.cuda.steps import DEVICE, NUM_RANKS, Rehearsed, become_rank_0_of_8, in_child, rehearse
from tests.published_targets import PUBLISHED_TARGETS

CHATS = [(1500, [(200, 500), (700, 800), (1100, 1500)]), (900, [(300, 900)]), (500, [(1, 100), (101, 490)])]
"""Documents of one to three answers, whose prompts provide only keys and values."""
DFLASH = {"anchors_per_document": 64, "num_layers": 3, "sliding_window": 256}
CASES: list[tuple[str, dict[str, Any]]] = [("mtp", {}), ("eagle3", {"draft_vocab_size": 32_000}), ("dflash", DFLASH)]


def rehearse_all() -> list[Rehearsed]:
    """Runs in a child a step of each case: a head, and its settings."""
    become_rank_0_of_8()
    target, train = PUBLISHED_TARGETS["llama3_1_8b"].config(), TrainConfig(compile=False, loss_chunk_rows=4096)
    return [
        rehearse(HEADS[name].Config(**{"ttt_steps": 5, **settings}), target, CHATS, train) for name, settings in CASES
    ]


def test_a_step_over_chats_gives_every_gradient_on_its_device_and_never_waits() -> None:
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")
    for step in in_child(rehearse_all):
        assert step.gradients.keys() == step.weights
        assert set(step.gradients.values()) == {(torch.bfloat16, DEVICE)}
        assert step.masters == {torch.float32}, "the optimizer works in fp32"
        assert step.num_masters == pytest.approx(step.num_values / NUM_RANKS, rel=0.01)
