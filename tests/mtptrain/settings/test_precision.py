"""Tests what `auto` stands for, on CPUs with and without bf16 instructions, and that a stage keeps what it began with.

`MTPTRAIN_CPU_BF16` pretends that the CPU has such instructions or lacks them, so that both paths run on any CPU.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from mtptrain.config import Dtype, load_config
from mtptrain.settings.hardware import this_machine
from mtptrain.settings.precision import fast_dtype
from mtptrain.stage_dir import FACTS, STAGE, StageDir
from mtptrain.training.deepspeed_engine import check_device
from mtptrain.utils.cpu import PRETENDED_BF16
from tests.conftest import compose_config, make_config

CHOICES = {"0": (Dtype.float32, False, 0), "1": (Dtype.bfloat16, True, 1)}
"""The dtype, whether DeepSpeed's bf16 is on, and the ZeRO stage."""


@pytest.mark.parametrize("pretended", CHOICES)
def test_auto_is_bf16_with_zero_1_on_cpus_with_bf16_and_plain_fp32_elsewhere_and_what_is_explicit_is_obeyed(
    pretended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRETENDED_BF16, pretended)
    dtype, is_bf16, stage = CHOICES[pretended]
    config = make_config()
    assert config.hidden_states.dtype == config.responses.dtype == dtype
    assert config.deepspeed == {"bf16": {"enabled": is_bf16}, "zero_optimization": {"stage": stage}}
    assert config.acceptance.dtype == Dtype.float32  # in which a CPU's counters equal the engine's
    config = make_config("hidden_states.dtype=float32", "responses.dtype=bfloat16", "deepspeed=zero2")
    assert (config.hidden_states.dtype, config.responses.dtype) == (Dtype.float32, Dtype.bfloat16)
    assert config.deepspeed == {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert make_config("acceptance.dtype=bfloat16").acceptance.dtype == Dtype.bfloat16
    with patch("mtptrain.config.started_stage", lambda: "plan"):  # for GPUs, on any machine
        config = make_config("planner.gpu_tflops=989")
    assert config.hidden_states.dtype == config.acceptance.dtype == Dtype.bfloat16
    assert config.deepspeed["bf16"]["enabled"]


def test_a_stage_that_has_begun_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StageDir(tmp_path / "run/hidden_states")
    config = make_config(f"run_dir={tmp_path}/run")
    assert config.hidden_states.dtype is Dtype.bfloat16
    folder.record(config)
    monkeypatch.setenv(PRETENDED_BF16, "0")
    assert make_config("run_dir=elsewhere").hidden_states.dtype is Dtype.float32
    assert make_config(f"run_dir={tmp_path}/run").hidden_states.dtype is Dtype.bfloat16
    (folder.path / STAGE).write_text(json.dumps(dict.fromkeys(FACTS, "") | {"settings": {"prompts": {}}}))
    assert make_config(f"run_dir={tmp_path}/run").hidden_states.dtype is Dtype.float32  # written without the setting


def test_an_old_gpu_computes_in_fp32_and_is_refused_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert fast_dtype(on_gpu=True) == (Dtype.float32, "because Tesla T4 has no bf16 instructions")
    with pytest.raises(
        ValueError, match=r"deepspeed.bf16.enabled: must be possible on a GPU.*but Tesla T4 has no bf16"
    ):
        check_device(torch.device("cuda"), {"bf16": {"enabled": True}})


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


def test_auto_is_the_hardware_that_is_nearest_to_the_machine() -> None:
    for number, memory_gb, hardware, batch_tokens in (
        (0, 0, "cpu", 1536),
        (1, 80, "gpu_1", 4096),
        (4, 80, "h100_8", 32768),
    ):
        with gpus(number, memory_gb):
            assert this_machine().hardware == hardware
            config = load_config(compose_config("recipe=mtp"))
        assert config.train.batch_tokens == batch_tokens
        assert config.planner.num_gpus == max(1, number)
        assert number == 0 or config.planner.gpu_memory_gb == memory_gb
        assert config.planner.gpu_tflops == 0
        assert config.hidden_states.backend == "transformers"
