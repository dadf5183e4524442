"""Tests what acceptance is measured with: the longest prompt, what is refused before, overlaps and calibration."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.acceptance import candidates_of, longest_prompt
from eval.draft_quality import DraftQuality
from mtptrain.config import AcceptanceConfig, Baseline
from mtptrain.decoding.draft import Draft
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Accepted, Round
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from tests.families import EXACT, SIZES
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


def test_later_turns_fit_the_contexts_of_target_and_heads() -> None:
    target = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100))
    settings = AcceptanceConfig(max_new_tokens=30, num_speculative_tokens=5)
    head, model = SimpleNamespace(context_tokens=None), SimpleNamespace(context_tokens=80)
    assert longest_prompt(target, [head, None], settings) == 70  # type: ignore[arg-type, list-item]
    assert longest_prompt(target, [head, model], settings) == 45  # type: ignore[list-item, arg-type]
    settings = AcceptanceConfig(max_new_tokens=3, num_speculative_tokens=5)
    assert longest_prompt(target, [head], settings) == 95  # type: ignore[list-item, arg-type]


def test_a_tree_is_refused_for_a_target_that_keeps_states() -> None:
    family, family_settings = EXACT["lfm2"]
    config = AutoConfig.for_model(family, **{**SIZES, **family_settings})
    target = Target(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    settings, found = AcceptanceConfig(baselines=[Baseline.tree]), SimpleNamespace(head=None)
    with pytest.raises(UserError, match=r"acceptance\.baselines: must not contain tree for a target .*; remove it"):
        candidates_of(settings, found, target, None, None, 0, {}, {})  # type: ignore[arg-type]
