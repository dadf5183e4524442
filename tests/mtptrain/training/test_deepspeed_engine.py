"""Tests the gradient norm, and that DeepSpeed settings that the trainer cannot honour are refused."""

import math

import pytest
import torch

from mtptrain.settings.precision import with_fp32_sums
from mtptrain.training.deepspeed_engine import check_deepspeed, total_norm
from mtptrain.utils.errors import UserError


def test_the_norm_of_many_values_is_exact_to_fp32() -> None:
    """On a CPU, a norm computed over all 10 million values at once is off by 4e-4."""
    tensors = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)), torch.full((3, 5), 7.0)
    expected = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    assert total_norm(tensors).item() == pytest.approx(expected, rel=1e-6)


def zero(stage: int, **settings: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **settings}}


def test_gradients_of_several_micro_batches_are_added_in_fp32_unless_bf16_is_asked_for() -> None:
    bf16, of_fp32 = {"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}
    for stage in (1, 2):
        assert with_fp32_sums(zero(stage) | bf16, 2) == zero(2) | bf16 | of_fp32
        for config, num_accumulated in (
            (zero(stage) | bf16, 1),
            (zero(stage), 2),
            (zero(stage) | bf16 | {"data_types": {"grad_accum_dtype": "bf16"}}, 2),
        ):
            assert with_fp32_sums(config, num_accumulated) == config


NOT_SET = r"{}: must not be set, but is {}: {}.*; remove it"
REFUSED: list[tuple[dict[str, object], str]] = [
    (zero(3), r"zero_optimization\.stage: must be 0, 1 or 2, but is 3: .* set deepspeed=zero2"),
    ({"bf16": {"enabled": True}}, r"stage: must be 1 or 2 with bf16, but is 0: .* set deepspeed=zero1"),
    ({"fp16": {"enabled": True}}, NOT_SET.format("fp16.enabled", True, "the loss is not scaled")),
    ({"zero_optimization": 5}, r"zero_optimization: must be a section of settings, but is 5"),
    (zero(1, offload_optimizer={"device": "cpu"}), r"offload_optimizer: must not be set, but is .*cpu.*; remove it"),
    (
        zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}},
        r"data_types\.grad_accum_dtype: must be left out with ZeRO 1, but is fp32: .* set deepspeed=zero2",
    ),
    ({"gradient_clipping": 0.5}, NOT_SET.format("gradient_clipping", 0.5, "the trainer sets it itself")),
]


def test_deepspeed_settings_that_the_trainer_does_not_do_are_refused() -> None:
    for config, message in REFUSED:
        with pytest.raises(ValueError, match=rf"^deepspeed\..*{message}"):
            check_deepspeed(config)


def test_another_version_of_deepspeed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.__version__", "0.17.5")
    with pytest.raises(UserError, match=r"^deepspeed: must be of version .*0\.19\.8, but is 0\.17\.5.*pip install"):
        check_deepspeed({})
