"""Tests the gradient norm, and that DeepSpeed settings that the trainer cannot honour are refused."""

import math

import pytest
import torch

from mtptrain.training.deepspeed_engine import check_deepspeed, total_norm


def test_the_norm_of_many_values_is_exact_to_fp32() -> None:
    """On a CPU, a norm computed over all 10 million values at once is off by 4e-4."""
    tensors = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)), torch.full((3, 5), 7.0)
    expected = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    assert total_norm(tensors).item() == pytest.approx(expected, rel=1e-6)


def zero(stage: int, **settings: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **settings}}


ITSELF = r"{}: must not be set, but is {}: the trainer sets it itself; remove it"
REFUSED: list[tuple[dict[str, object], str]] = [
    (zero(3), r"zero_optimization\.stage: must be 0, 1 or 2, but is 3: .* set deepspeed=zero2"),
    ({"bf16": {"enabled": True}}, r"stage: must be 1 or 2 with bf16, but is 0: .* set deepspeed=zero1"),
    ({"fp16": {"enabled": True}}, r"fp16\.enabled: must be false, but is true: .* set deepspeed=zero1"),
    ({"zero_optimization": 5}, r"zero_optimization: must be a section of settings, but is 5"),
    ({"bf16": "maybe"}, r"bf16: must be a section of settings, but is 'maybe'"),
    (zero(1, offload_optimizer={"device": "cpu"}), r"offload_optimizer: must not be set, but is .*cpu.*; remove it"),
    (zero(2, round_robin_gradients=True), r"round_robin_gradients: must not be set, .* weights of the wrong parameter"),
    (
        zero(1) | {"bf16": {"enabled": True, "check_grad_overflow": True}},
        r"check_grad_overflow: must not be set, but is True: .* skip a step with an overflow",
    ),
    (
        zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}},
        r"data_types\.grad_accum_dtype: must be left out with ZeRO 1, but is fp32: .* set deepspeed=zero2",
    ),
    ({"gradient_clipping": 0.5}, ITSELF.format("gradient_clipping", 0.5)),
    ({"gradient_allreduce_op": "mean"}, ITSELF.format("gradient_allreduce_op", "mean")),
    *(
        ({name: 1}, ITSELF.format(name, 1))
        for name in ("scheduler", "steps_per_print", "zero_allow_untested_optimizer")
    ),
]


def test_deepspeed_settings_that_the_trainer_does_not_do_are_refused() -> None:
    for config, message in REFUSED:
        with pytest.raises(ValueError, match=rf"^deepspeed\..*{message}"):
            check_deepspeed(config)
