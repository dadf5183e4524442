"""Tests how often heads with an MLP per depth run, and which settings are refused."""

import pytest

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target
from tests.conftest import make_config

BOTH = pytest.mark.parametrize("name", ["medusa", "hydra"])
K = 3


@pytest.mark.parametrize(("name", "later_depths"), [("medusa", 0), ("hydra", K - 1)])
def test_medusa_drafts_all_tokens_at_once_and_hydra_one_after_the_other(
    target: Target, name: str, later_depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, calls = build_head(HEADS[name].Config(ttt_steps=K), target.config).eval(), []
    draft_next = head.draft_next
    monkeypatch.setattr(head, "draft_next", lambda *args: calls.append(None) or draft_next(*args))
    (answer,) = speculate(
        target,
        HeadDrafter(head, target.parts, K),
        [[1, 2, 3]],
        num_speculative_tokens=K,
        max_new_tokens=8,
        sampler=Sampler(),
    )
    assert len(calls) == later_depths * answer.rounds


@BOTH
def test_more_drafts_than_trained_depths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^acceptance\.num_speculative_tokens: must be at most head\.ttt_steps=3 "):
        make_config(f"head={name}", "head.ttt_steps=3", "acceptance.num_speculative_tokens=4")


@BOTH
def test_a_head_without_layers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^head\.num_layers: must be a number from 1 to 256, but is 0; correct it"):
        make_config(f"head={name}", "head.num_layers=0")
