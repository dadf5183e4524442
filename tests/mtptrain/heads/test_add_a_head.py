"""Tests that the head of docs/add_a_head.md fulfils the contract of heads and can be trained."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.training.losses import LossSettings, draft_losses
from tests.mtptrain.heads.test_contract import (
    DEPTHS,
    PARTS,
    draw_norms,
    largest_difference,
    packed_inputs,
    run,
    tiny_config,
)

PAGE = Path(__file__).parents[3] / "docs" / "add_a_head.md"


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def head(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    """Builds the page's head and registers it as the page says."""
    [source] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    path = tmp_path / "gated.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("gated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(HEADS, "gated", module.GatedHead)
    torch.manual_seed(0)
    head = build_head(HEADS["gated"].Config(ttt_steps=DEPTHS, gate_bias=request.param), tiny_config())
    draw_norms(head)
    return head


@torch.no_grad()
def test_the_pages_head_decodes_what_it_was_trained_on(head: Head) -> None:
    tokens = packed_inputs(head)
    assert largest_difference(head, run(head, tokens)) < 1e-5
    shifted = replace(tokens, next_ids=torch.roll(tokens.next_ids, -1))
    assert largest_difference(head, run(head, shifted)) > 1e-2


def test_the_pages_head_has_a_finite_loss_and_all_gradients(head: Head) -> None:
    tokens, lm_head = packed_inputs(head), PARTS.lm_head
    states = run(head, tokens)  # [T, M, H]
    is_draft = torch.ones(states.shape[:2], dtype=torch.bool)
    scale = torch.full((DEPTHS,), 1 / is_draft.sum())
    sums = draft_losses(
        states,
        lm_head,
        tokens.target_states,
        PARTS.logits,
        is_draft,
        scale,
        LossSettings(),
        head.draft_token_ids,
    )
    sums.loss.backward()
    assert sums.loss.isfinite() and sums.loss > 0
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any() for weight in head.parameters()
    )
