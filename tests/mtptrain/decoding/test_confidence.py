"""Tests that a confidence is calibrated to what was accepted, and that a trained head is used with its calibration."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.decoding.confidence import Confidences, calibration_error, fit
from mtptrain.decoding.draft import Draft
from mtptrain.decoding.speculate import Accepted, Round
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.files import SCALE, SHIFT, TARGET_WEIGHTS, build_head, save_head
from mtptrain.init_from.start import trained_or_initial_head
from mtptrain.target.files import TargetFiles, weights_fingerprint
from mtptrain.training.validation import Validation
from mtptrain.utils.distributed import Ranks
from tests.conftest import make_config
from tests.mtptrain.heads.test_contract import draw_norms


def test_the_numbers_by_which_drafts_were_accepted_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator, dtype=torch.float64) * 2
    for scale, shift in ((1.0, 0.0), (0.5, -1.0), (2.0, 0.7)):
        accepted = torch.bernoulli((scale * logits + shift).sigmoid(), generator=generator)
        calibration = fit(torch.stack([logits.sigmoid(), accepted], 1))
        assert (calibration.confidence_scale, calibration.confidence_shift) == pytest.approx((scale, shift), abs=0.08)
        assert calibration.confidence_error < 0.02
        assert scale == 1 or calibration.confidence_error < calibration.confidence_error_before / 4
    # Drafts of which fp32 is certain do not bend the fit.
    logits = torch.cat([logits[:5000], torch.full((5000,), 18.0).double()])
    accepted = torch.bernoulli((0.2 * logits).sigmoid(), generator=generator)
    calibration = fit(torch.stack([logits.float().sigmoid().double(), accepted], 1))
    assert (calibration.confidence_scale, calibration.confidence_shift) == pytest.approx((0.2, 0.0), abs=0.08)


def test_few_or_certain_drafts_give_finite_numbers() -> None:
    assert list(vars(fit(torch.zeros(0, 2, dtype=torch.float64))).values()) == [1.0, 0.0, None, None]
    for accepted in (0.0, 1.0):
        drafts = torch.tensor([[1.0, accepted], [0.5, accepted], [0.0, 1 - accepted]], dtype=torch.float64)
        assert all(abs(value) < 100 for value in vars(fit(drafts)).values())
    confidences, hits = torch.tensor([0.05, 0.07, 0.95, 1.0]).double(), torch.tensor([0, 1, 1, 1]).double()
    assert calibration_error(confidences, hits) == pytest.approx((abs(0.12 - 1) + abs(1.95 - 2)) / 4), "by ten bins"


def test_only_drafts_after_accepted_ones_in_unfinished_sequences_count() -> None:
    confidences = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    tokens, count = torch.zeros(3, 3, dtype=torch.long), torch.tensor([0, 2, 3])
    draft = Draft(tokens, torch.ones(3, 3, dtype=torch.bool), confidences=confidences)
    observed = Confidences()
    observed(Round(draft, Accepted(count, count, tokens), torch.empty(0), torch.tensor([True, True, False])))
    wanted = torch.tensor([[0.1, 0.0], [0.4, 1.0], [0.5, 1.0], [0.6, 0.0]])
    torch.testing.assert_close(observed.drafts(), wanted.double(), atol=1e-6, rtol=0)


def test_validation_finds_the_calibration_with_which_a_trained_head_is_used(tmp_path: Path, tiny_target: Path) -> None:
    overrides = ("head=dspark", "train.loss={kl:1,confidence:1}", "head.ttt_steps=3", "head.capture_layers=[1,2]")
    config, target = make_config(*overrides, "acceptance.num_speculative_tokens=3"), TargetFiles(tiny_target)
    assert isinstance(config.head, DsparkHead.Config)
    torch.manual_seed(0)
    head = build_head(config.head, target.config)
    draw_norms(head)
    validation = Validation.__new__(Validation)  # with prompts of the test's own
    validation.head_config, validation.training, validation.settings = config.head, config.train, config.acceptance
    validation.target, validation.ranks = target, Ranks(0, 1, 0)
    validation.dtype, validation._loaded = torch.float32, None
    validation.prompts = [[5, 6, 7], [8, 9, 10, 11]]
    record = validation.measure(head.state_dict()).record()
    facts = {name: record[name] for name in (SCALE, SHIFT)} | {TARGET_WEIGHTS: weights_fingerprint(tiny_target)}
    scale, shift = float(str(record[SCALE])), float(str(record[SHIFT]))
    assert (scale, shift) != (1.0, 0.0)
    states, previous = torch.randn(4, 64), torch.tensor([3, 4, 5, 6])
    calibrated = (scale * head.confidence_of(states, previous).logit() + shift).sigmoid()

    def used(run: str, init_from: str | None = None) -> tuple[str, torch.Tensor]:
        """Returns the hash of the head that a run uses, and its confidences."""
        settings = replace(config.head, init_from=init_from)
        found = trained_or_initial_head(tmp_path / run, settings, target, None, torch.device("cpu"))
        return found.sha256, found.head.confidence_of(states, previous)

    save_head(tmp_path / "run/best", head.state_dict(), config.head, facts)
    torch.testing.assert_close(used("run")[1], calibrated, atol=1e-4, rtol=1e-4)
    # A head of `head.init_from` is used so too, and its hash is another one than without calibration.
    sha256, confidences = used("other", f"{tmp_path}/run/best")
    assert torch.equal(confidences, used("run")[1])
    del facts[SCALE]
    save_head(tmp_path / "run/best", head.state_dict(), config.head, facts)
    raw_sha256, raw = used("other", f"{tmp_path}/run/best")
    assert raw_sha256 != sha256 and torch.equal(raw, head.confidence_of(states, previous))
