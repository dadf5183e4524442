"""Tests that planned times follow from given speeds, from FLOPs and a given peak, or from a measured device."""

from collections.abc import Callable

import pytest
import torch

from mtptrain.config import PipelineConfig
from mtptrain.planning.plan import make_plan


def test_times_come_from_given_tokens_per_s(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(
        config_for(
            "prompts.max_train_tokens=100_000",
            "planner.hidden_states_tokens_per_s=500",
            "planner.train_tokens_per_s=1000",
            "train.epochs=3",
        )
    )
    assert (plan.extraction_speed.seconds, plan.training_speed.seconds) == (200.0, 300.0)


def test_times_come_from_flops_and_the_peak(config_for: Callable[..., PipelineConfig]) -> None:
    config = config_for(
        "prompts.max_train_tokens=1_000_000", "prompts.max_document_tokens=128", "planner.gpu_tflops=1e-3"
    )
    plan = make_plan(config)
    # Weights of one layer of the tiny target: q and o, k and v, MLP, norms.
    layer = 2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    # FLOPs of two layers and the final norm, and of two attention matmuls per layer over half a document.
    flops = 2 * (2 * layer + 64) + 2 * 2 * 2 * 64 * 128 / 2
    assert plan.extraction_speed.tokens_per_s == pytest.approx(8 * 1e9 * 0.4 / flops)
    assert plan.extraction_speed.seconds == pytest.approx(1e6 * flops / (8 * 1e9 * 0.4))


def test_a_slow_disk_holds_both_stages_up(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(
        config_for("prompts.max_train_tokens=1_000_000", "planner.gpu_tflops=1000", "planner.disk_gb_per_s=0.001")
    )
    assert plan.extraction_speed.seconds == pytest.approx(1e6 * (2 * 64 + 5) / 1e6)
    assert "disk of 0.001 GB/s" in plan.training_speed.basis


def test_without_a_given_peak_the_device_at_hand_is_measured(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(config_for())
    assert plan.extraction_speed.tokens_per_s > 0
    assert ("CPU" in plan.training_speed.basis) != torch.cuda.is_available()
