"""Tests the packed weights that make the few rows of a round fast."""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from mtptrain.target.few_rows import MOST_ROWS, FrozenLinear
from mtptrain.target.loading import load_target
from mtptrain.target.position_cache import PositionCache

WEIGHT, BIAS = torch.randn(24, 48), torch.randn(24)


def test_the_product_and_its_gradient_are_torchs_own() -> None:
    for bias in (None, BIAS):
        for shape in ((1,), (2,), (1, 5), (2, 3), (MOST_ROWS,), (MOST_ROWS + 1,), (3, 20)):
            rows = torch.randn(*shape, 48, requires_grad=True)
            with torch.no_grad():
                torch.testing.assert_close(FrozenLinear(WEIGHT, bias)(rows.detach()), F.linear(rows, WEIGHT, bias))
            FrozenLinear(WEIGHT, bias)(rows).sum().backward()
            assert rows.grad is not None
            torch.testing.assert_close(rows.grad, WEIGHT.sum(0).expand(*shape, 48))


def test_layers_and_lm_head_of_a_target_use_it(tiny_target: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    target, tokens = load_target(tiny_target, torch.float32, torch.device("cpu")), torch.arange(4)[None]
    with torch.no_grad():
        states = target.forward(tokens, tokens, PositionCache(8))
        logits = target.logits(states.postnorm_states)
        torch.testing.assert_close(logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    linears = [module.forward for module in target.model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(linear, FrozenLinear) and linear._packed is not None for linear in linears)
    assert target._output._packed is not None
