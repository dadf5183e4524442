"""The head of docs/add_a_head.md, built from the page, fulfils the contract and can be trained."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.training.losses import LossSettings, draft_losses
from tests.mtptrain.heads.test_contract import DEPTHS, draw_norms, largest_difference, packed_inputs, run, tiny_config

PAGE = Path(__file__).parents[3] / "docs" / "add_a_head.md"


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def head(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    """The page's head, registered as the page says."""
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
    hidden_states, embeddings, packing = packed_inputs(head)
    assert largest_difference(head, run(head, hidden_states, embeddings, packing)) < 1e-5
    assert largest_difference(head, run(head, hidden_states, embeddings, packing, shift=2)) > 1e-2


def test_the_pages_head_has_a_finite_loss_and_all_gradients(head: Head) -> None:
    hidden_states, embeddings, packing = packed_inputs(head)
    lm_head = torch.randn(50, 128, generator=torch.Generator().manual_seed(2)) / 10
    states = run(head, hidden_states, embeddings, packing)  # [T, M, H]
    is_draft = torch.ones(states.shape[:2], dtype=torch.bool)
    scale = torch.full((DEPTHS,), 1 / is_draft.sum())
    sums = draft_losses(
        states, lm_head, hidden_states, lambda x: x @ lm_head.T, is_draft, scale, LossSettings(), head.draft_token_ids
    )
    sums.loss.backward()
    assert sums.loss.isfinite() and sums.loss > 0
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any() for weight in head.parameters()
    )
