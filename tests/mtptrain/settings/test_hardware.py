"""Tests what `hardware=auto` stands for on this machine and on others."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir

from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.settings.hardware import this_machine


@contextmanager
def gpus(number: int, memory_gb: int) -> Iterator[None]:
    """Let torch report this many GPUs."""
    properties = SimpleNamespace(total_memory=memory_gb * 10**9)
    with (
        patch("torch.cuda.is_available", lambda: number > 0),
        patch("torch.cuda.is_bf16_supported", lambda **_: True),
        patch("torch.cuda.device_count", lambda: number),
        patch("torch.cuda.get_device_properties", lambda _: properties),
    ):
        yield


def composed() -> PipelineConfig:
    with initialize_config_dir(RECIPES, version_base="1.3"):
        return load_config(compose("pipeline", ["recipe=mtp"]))


@pytest.mark.parametrize(
    ("number", "memory_gb", "hardware", "batch_tokens"),
    [
        (0, 0, "cpu", 1536),
        (1, 80, "gpu_1", 4096),
        (4, 80, "h100_8", 32768),
    ],
)
def test_auto_is_the_hardware_that_is_nearest_to_the_machine(
    number: int, memory_gb: int, hardware: str, batch_tokens: int
) -> None:
    with gpus(number, memory_gb):
        assert this_machine().hardware == hardware
        config = composed()
    assert config.train.batch_tokens == batch_tokens
    assert config.planner.num_gpus == max(1, number)
    assert number == 0 or config.planner.gpu_memory_gb == memory_gb
    assert config.planner.gpu_tflops == 0
    assert config.hidden_states.backend == "transformers"
