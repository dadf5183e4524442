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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            r"deepspeed\.zero_optimization\.stage: must be 0, 1 or 2, but is 3: .* set deepspeed=zero2",
        ),
        (
            {"bf16": {"enabled": True}},
            r"deepspeed\.zero_optimization\.stage: must be 1 or 2 with bf16, but is 0: .* set deepspeed=zero1",
        ),
        ({"fp16": {"enabled": True}}, r"deepspeed\.fp16\.enabled: must be false, but is true: .* set deepspeed=zero1"),
        (
            {"gradient_clipping": 0.5},
            r"deepspeed\.gradient_clipping: must not be set, but is 0\.5: the trainer sets it",
        ),
        ({"zero_optimization": 5}, r"deepspeed\.zero_optimization: must be a section of settings, but is 5"),
        ({"bf16": "maybe"}, r"deepspeed\.bf16: must be a section of settings, but is 'maybe'"),
        (
            {"gradient_allreduce_op": "mean"},
            r"deepspeed\.gradient_allreduce_op: must not be set, but is mean: the trainer sets it",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            r"deepspeed\.zero_optimization\.offload_optimizer: must not be set, but is .*cpu.*; remove it",
        ),
        (
            {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
            r"deepspeed\.zero_optimization\.round_robin_gradients: must not be set, but is True: .* weights of the "
            r"wrong parameters",
        ),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "check_grad_overflow": True}},
            r"deepspeed\.bf16\.check_grad_overflow: must not be set, but is True: .* skip a step with an overflow",
        ),
        *(
            ({name: 1}, rf"deepspeed\.{name}: must not be set, but is 1: the trainer sets it itself; remove it")
            for name in ("scheduler", "steps_per_print", "zero_allow_untested_optimizer")
        ),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            r"deepspeed\.data_types\.grad_accum_dtype: must be left out with ZeRO 1, but is fp32: .* set "
            r"deepspeed=zero2",
        ),
    ],
)
def test_deepspeed_settings_that_the_trainer_does_not_do_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_deepspeed(config)
