"""Tests that the head of docs/add_a_head.md fulfils the contract of heads and can be trained."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.settings import heads
from tests.mtptrain.heads.test_contract import DEPTHS, draw_norms, largest_difference, packed_inputs, run
from tests.mtptrain.heads.test_contract import tiny_config as target_config

PAGE = Path(__file__).parents[3] / "docs" / "add_a_head.md"


def test_the_pages_head_decodes_what_it_was_trained_on_and_has_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is built and registered as the page says."""
    of_settings, of_head = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(of_settings, found := dict(vars(heads)))
    monkeypatch.setattr(heads, "GatedConfig", found["GatedConfig"], raising=False)
    exec(of_head, found := {"__name__": "gated"})
    monkeypatch.setitem(HEADS, "gated", found["GatedHead"])
    torch.manual_seed(0)
    head = build_head(HEADS["gated"].Config(ttt_steps=DEPTHS), target_config())
    draw_norms(head)
    tokens = packed_inputs(head)
    states = run(head, tokens)  # [T, M, H]
    with torch.no_grad():
        assert largest_difference(head, states) < 2e-5
        shifted = replace(tokens, next_ids=torch.roll(tokens.next_ids, -1))
        assert largest_difference(head, run(head, shifted)) > 1e-2
    states.square().mean().backward()
    grads = [weight.grad for weight in head.parameters()]
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads)
