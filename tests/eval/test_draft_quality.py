"""Tests that overlap is the probability of acceptance, and that confidence is binned correctly."""

import pytest
import torch

from eval.draft_quality import DraftQuality
from mtptrain.decoding.draft import Draft
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Accepted, Round
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import build_head
from tests.mtptrain.heads.test_contract import tiny_config


def test_figures_count_rounds_that_reach_a_position_and_active_sequences() -> None:
    """The expected figures are computed by hand, for a head that drafts two of the target's four tokens."""
    head = build_head(Eagle3Head.Config(capture_layers=[1], draft_vocab_size=2), tiny_config(vocab_size=4))
    assert head.d2t is not None
    head.d2t.copy_(torch.tensor([1, 2]))  # the head's tokens 0 and 1 are the target's 1 and 3
    draft_probs = torch.tensor([[0.75, 0.25], [0.55, 0.45]])  # at positions 0 and 1, equal for all sequences
    target_probs = torch.tensor([[0.1, 0.6, 0.1, 0.2], [0.5, 0.0, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]])
    tokens = torch.tensor([[1, 3], [1, 3], [1, 3]])
    logits = tuple(draft_probs[k].log().expand(3, 2) for k in range(2))
    draft = Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), logits=logits)
    accepted = Accepted(torch.tensor([0, 2, 1]), torch.zeros(3, dtype=torch.long), torch.arange(3).expand(3, -1))
    quality = DraftQuality(head, Sampler(), vocab_size=4, num_depths=2)
    target_logits, is_active = target_probs.log().clamp(min=-1e4).expand(3, 3, 4), torch.tensor([True, True, False])
    quality(Round(draft, accepted, target_logits, is_active))
    figures = quality.figures(quality.sums())
    assert figures.rounds_at == [2, 1]  # the first sequence is rejected at position 0, and the third is not active
    assert figures.overlap_at == pytest.approx([0.6 + 0.2, 0.0 + 0.1], abs=1e-6)
    assert figures.accepted_at == pytest.approx([0.5, 1.0])
    # The confidence is 0.45 in one round at position 1, and 0.75 in two rounds at position 0.
    assert [tenth["drafts"] for tenth in figures.calibration] == [1, 2]
    assert [tenth["confidence"] for tenth in figures.calibration] == pytest.approx([0.45, 0.75], abs=1e-6)
    assert [tenth["accepted"] for tenth in figures.calibration] == pytest.approx([1.0, 0.5])
    assert (
        figures.calibration_error == pytest.approx((1 * 0.55 + 2 * 0.25) / 3, abs=1e-6) and figures.temperature == 1.0
    )
