"""Tests what makes the few rows of a round fast: packed weights, and attention that does not copy the cache."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from mtptrain.target.causal_attention import masked_attention
from mtptrain.target.few_rows import MOST_ROWS, FrozenLinear
from mtptrain.target.loading import load_target
from mtptrain.target.position_cache import PositionCache

WEIGHT, BIAS = torch.randn(24, 48), torch.randn(24)


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 5), (2, 3), (MOST_ROWS,), (MOST_ROWS + 1,), (3, 20)])
def test_product_is_torchs_own(shape: tuple[int, ...], bias: torch.Tensor | None) -> None:
    rows = torch.randn(*shape, 48)
    with torch.no_grad():
        torch.testing.assert_close(FrozenLinear(WEIGHT, bias)(rows), F.linear(rows, WEIGHT, bias))


def test_gradient_flows_through_torchs_own_product() -> None:
    rows = torch.randn(3, 48, requires_grad=True)
    FrozenLinear(WEIGHT)(rows).sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, WEIGHT.sum(0).expand(3, -1))


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


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_query_heads_share_the_keys_of_their_group(num_heads: int, num_kv_heads: int, scaling: float | None) -> None:
    query = torch.randn(2, num_heads, 3, 8)
    key, value = torch.randn(2, num_kv_heads, 9, 8), torch.randn(2, num_kv_heads, 9, 5)
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[..., 0] = True  # each row sees a slot
    groups = num_heads // num_kv_heads
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * (scaling or 8**-0.5)
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = probs @ value.repeat_interleave(groups, 1)
    torch.testing.assert_close(masked_attention(query, key, value, mask, scaling), expected)
