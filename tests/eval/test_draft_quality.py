"""Tests that overlap is the probability of acceptance, and that confidence is binned correctly."""

from pathlib import Path

import pytest
import torch

from eval.draft_quality import DraftQuality
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.draft import Draft
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Accepted, Round
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import build_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.target.loading import load_target
from tests.conftest import make_target


def test_figures_count_rounds_that_reach_a_position_and_active_sequences(tmp_path: Path) -> None:
    """The expected figures are computed by hand, for a head that drafts two of the target's four tokens."""
    target = load_target(
        make_target(tmp_path / "target", vocab_size=4, eos_token_id=None), torch.float32, torch.device("cpu")
    )
    head = build_head(Eagle3Head.Config(capture_layers=[1], draft_vocab_size=2), target.config)
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


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9}])
def test_sampled_drafts_are_accepted_as_often_as_the_distributions_overlap(
    filters: dict[str, float], tmp_path: Path
) -> None:
    """Speculative sampling guarantees this (arXiv 2211.17192), so the test also checks the acceptance rule."""
    directory = make_target(tmp_path / "target", vocab_size=12, eos_token_id=None, initializer_range=0.15)
    target = load_target(directory, torch.float32, torch.device("cpu"))
    torch.manual_seed(3)
    head = build_head(MtpHead.Config(), target.config).eval().requires_grad_(False)
    sampler = Sampler(0.8, seed=1, **filters)  # type: ignore[arg-type]
    quality = DraftQuality(head, Sampler(0.8, **filters), vocab_size=12, num_depths=2)  # type: ignore[arg-type]
    drafter, prompts = HeadDrafter(head, target.parts, 2, sample_drafts=True), [[3, 1, 4]] * 3000
    sizes = {"num_speculative_tokens": 2, "max_new_tokens": 8, "batch_size": 1000}
    settings = {"sampler": sampler, "eos_token_ids": (), "observe": quality, **sizes}
    generate_in_batches(target, drafter, prompts, **settings)  # type: ignore[arg-type]
    figures = quality.figures(quality.sums())
    assert figures.calibration == [] and figures.calibration_error is None
    assert figures.rounds_at[0] > 5000 and 0.1 < figures.overlap_at[0] < 0.9
    for overlap, accepted, rounds in zip(figures.overlap_at, figures.accepted_at, figures.rounds_at, strict=True):
        assert accepted == pytest.approx(overlap, abs=4 * 0.5 / rounds**0.5)
