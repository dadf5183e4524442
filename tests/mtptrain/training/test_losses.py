"""Tests the chunked loss against the plain formula, which needs all logits at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtptrain.config import LossPart
from mtptrain.training.loss_blocks import compare
from mtptrain.training.loss_parts import Drafted
from mtptrain.training.losses import LossSettings, LossSums, draft_ids_of, draft_losses
from mtptrain.training.teacher import Teacher, teach, teach_by_logits, teach_by_probs
from mtptrain.utils import compile as fusing
from tests.mtptrain.training.plain_losses import PARTS_OF_LOGITS

T, M, H, V = 3, 40, 16, 50


def inputs(last_positions: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Returns inputs whose spans end with these draft positions. Those after the last span do not count."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(T, M, H, generator=generator).requires_grad_()
    target_states, lm_head = torch.randn(M, H, generator=generator), torch.randn(V, H, generator=generator)
    left_in_span = torch.tensor([next((last - i + 1 for last in last_positions if last >= i), 0) for i in range(M)])
    return states, target_states, lm_head, left_in_span > torch.arange(T)[:, None]


def run_kl(
    states: torch.Tensor,
    target_states: torch.Tensor,
    lm_head: torch.Tensor,
    is_draft: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> LossSums:
    """Runs the KL loss of a head that uses the target's own lm_head, or its rows of a draft vocabulary."""
    own, settings = lm_head if ids is None else lm_head[ids], LossSettings(chunk_rows=16)
    return draft_losses(states, own, target_states, lambda x: x @ lm_head.T, is_draft, torch.ones(T), settings, ids)


def test_top1_accuracy_counts_drafts_whose_most_likely_token_is_the_targets() -> None:
    states, target_states, lm_head, is_draft = inputs((20, 39))
    with torch.no_grad():
        states[0] = target_states  # depth 0 drafts what the target predicts
    ours = run_kl(states, target_states, lm_head, is_draft)
    assert ours.top1_accuracy[0] == is_draft[0].sum()
    assert ours.kl[0].abs() < 1e-3
    assert ours.top1_accuracy[1] < 0.2 * is_draft[1].sum()


def test_top1_accuracy_in_a_draft_vocabulary_counts_the_same_tokens_of_the_target() -> None:
    states, target_states, lm_head, is_draft = inputs((20, 39))
    with torch.no_grad():
        states[0] = target_states
    ids, wanted = torch.arange(0, V, 3), (target_states @ lm_head.T).argmax(-1)
    drafted = ids[(states @ lm_head[ids].T).argmax(-1)]  # [T, M]
    is_right = (drafted == torch.stack([wanted.roll(-depth) for depth in range(T)])) & is_draft
    assert is_right[0].any() and not is_right[0, is_draft[0]].all()
    ours = run_kl(states, target_states, lm_head, is_draft, ids)
    assert ours.top1_accuracy.tolist() == is_right.sum(1).tolist()


def test_without_drafts_the_loss_and_its_gradient_are_0() -> None:
    states, target_states, lm_head, is_draft = inputs(())
    ours = run_kl(states, target_states, lm_head, is_draft)
    (gradient,) = torch.autograd.grad(ours.loss, states)
    assert not ours.loss and not ours.kl.any() and not gradient.any()


def test_gradients_hold_where_the_target_is_almost_surely_outside_the_draft_vocabulary() -> None:
    states, target_states, lm_head, is_draft = inputs((20, 39))
    ids = torch.arange(0, V, 3)
    bias = torch.full((V,), 12.0).index_fill_(0, ids, 0.0)  # gives the draft vocabulary a probability of some 1e-6
    scale, own = torch.ones(T), lm_head[ids]
    ours = draft_losses(
        states, own, target_states, lambda x: x @ lm_head.T + bias, is_draft, scale, LossSettings(), ids
    )
    (our_grad,) = torch.autograd.grad(ours.loss, states)
    wide, wide_own = states.detach().double().requires_grad_(), own.double()
    teacher = (target_states.double() @ lm_head.double().T + bias).softmax(-1)[:, ids]
    loss = torch.zeros((), dtype=torch.float64)
    for depth in range(T):
        drafts = is_draft[depth].nonzero()[:, 0]
        loss = loss - (teacher[drafts + depth] * (wide[depth, drafts] @ wide_own.T).log_softmax(-1)).sum()
    (expected,) = torch.autograd.grad(loss, wide)
    assert ((our_grad - expected).norm() / expected.norm()).item() < 1e-5


def test_tokens_of_the_data_are_found_in_a_draft_vocabulary_in_any_order() -> None:
    tokens, ids = torch.tensor([3, 9, 200, 7, 255, 4]), torch.tensor([9, 3, 200, 4])
    assert draft_ids_of(tokens, ids).tolist() == [1, 0, 2, -1, -1, 3]
    assert draft_ids_of(tokens, ids.sort().values).tolist() == [0, 2, 3, -1, -1, 1]


OWN_VOCABULARY = torch.arange(1, V, 3)


def run_kind(
    kind: LossPart, draft_token_ids: torch.Tensor | None, states: torch.Tensor, target_logits: torch.Tensor
) -> LossSums:
    """Computes a loss over one span of all draft positions, from the target's logits [M, V]."""
    lm_head = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    return draft_losses(
        states,
        lm_head if draft_token_ids is None else lm_head[draft_token_ids],
        torch.arange(float(M))[:, None],
        lambda states: target_logits[states[:, 0].long()],
        torch.arange(M) < M - torch.arange(T)[:, None],
        torch.tensor([0.5, 0.3, 0.2]),
        LossSettings({kind: 1.0}, chunk_rows=24),
        draft_token_ids,
        torch.arange(M) % V if kind is LossPart.data_ce else None,
    )


@pytest.mark.parametrize("draft_token_ids", [None, OWN_VOCABULARY])
@pytest.mark.parametrize("kind", PARTS_OF_LOGITS)
def test_a_compiled_loss_is_the_plain_one(
    kind: LossPart, draft_token_ids: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, target_states, lm_head, _ = inputs((M - 1,))
    found = []
    for is_fused in (False, True):
        monkeypatch.setattr(fusing, "_is_on", is_fused)
        sums = run_kind(kind, draft_token_ids, states, target_states @ lm_head.T)
        found.append(
            (sums.loss, sums.losses, sums.kl, sums.top1_accuracy, sums.overlap, *torch.autograd.grad(sums.loss, states))
        )
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("draft_token_ids", [None, OWN_VOCABULARY])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("token", [0, 1])
def test_a_logit_of_the_target_that_is_not_finite_is_seen_in_the_kl(
    token: int, bad: float, draft_token_ids: torch.Tensor | None
) -> None:
    """Token 1 is in `OWN_VOCABULARY`, and token 0 is not."""
    states, target_states, lm_head, _ = inputs((M - 1,))
    logits = target_states @ lm_head.T
    assert run_kind(LossPart.kl, draft_token_ids, states, logits).kl.isfinite().all()
    logits[M // 2, token] = bad
    assert run_kind(LossPart.kl, draft_token_ids, states, logits).kl.isnan().all()


def blocks(num_depths: int, num_positions: int, vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Returns drafts' logits [T * C, D], which of them count, the target's logits [C, V] and the depths' weights."""
    generator = torch.Generator().manual_seed(num_depths)
    logits = 2 * torch.randn(num_depths * num_positions, vocab_size, generator=generator)
    is_counted = torch.rand(len(logits), generator=generator) < 0.9
    return logits, is_counted, 2 * torch.randn(num_positions, V, generator=generator), 0.8 ** torch.arange(num_depths)


@pytest.mark.parametrize("draft_token_ids", [None, OWN_VOCABULARY])
@pytest.mark.parametrize("kind", PARTS_OF_LOGITS)
def test_a_teacher_by_logits_is_the_one_by_probabilities(kind: LossPart, draft_token_ids: torch.Tensor | None) -> None:
    """GPUs use logits, and CPUs use probabilities."""
    logits, is_counted, target_logits, scale = blocks(3, 16, V if draft_token_ids is None else len(draft_token_ids))
    by_logits, by_probs = (form(target_logits, draft_token_ids) for form in (teach_by_logits, teach_by_probs))
    assert torch.equal(by_logits.tokens, by_probs.tokens)
    data_tokens = torch.arange(16) if kind is LossPart.data_ce else None
    found, wanted = (
        compare(logits, teacher, {kind: is_counted * scale.repeat_interleave(16)}, 3, 3.0, data_tokens)
        for teacher in (by_logits, by_probs)
    )
    for x, y in zip(tensors(found), tensors(wanted), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def tensors(drafted: Drafted) -> list[torch.Tensor]:
    """Returns all tensors of a comparison."""
    found = [drafted.kl, drafted.overlap, drafted.is_right, drafted.target_ce, drafted.data_ce, drafted.gradient]
    return [x for x in (*found, *drafted.divergences.values()) if x is not None]


@pytest.mark.parametrize("draft_token_ids", [None, OWN_VOCABULARY])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("token", [0, 1])
def test_a_teacher_by_logits_shows_a_logit_that_is_not_finite_in_the_kl(
    token: int, bad: float, draft_token_ids: torch.Tensor | None
) -> None:
    logits, _, target_logits, _ = blocks(2, 16, V if draft_token_ids is None else len(draft_token_ids))
    target_logits[5, token] = bad
    drafted = compare(logits, teach_by_logits(target_logits, draft_token_ids), {}, 2, 3.0)
    assert drafted.kl.isnan().nonzero()[:, 0].tolist() == [5, 21]


def compare_compiled_in_one_process() -> None:
    """Compares compiled blocks of different sizes and depths with plain ones.

    Regression test: in this order, code that had been compiled for one depth was wrongly used for two depths.
    """
    for num_depths, num_positions in ((1, 50), (2, 50), (1, 13), (2, 20)):
        logits, is_counted, target_logits, scale = blocks(num_depths, num_positions, V)
        teacher: Teacher = teach(target_logits, None)
        found = []
        for is_fused in (False, True):
            fusing.set_compilation(is_fused)
            weights = is_counted * scale.repeat_interleave(num_positions)
            drafted = compare(logits, teacher, {LossPart.lk: weights, LossPart.jsd: weights}, num_depths, 3.0)
            found.append(tensors(drafted))
        for plain, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-5)


def test_compiled_code_of_one_depth_does_not_run_for_two(tmp_path: Path) -> None:
    """The test needs a new process and an empty cache, because compiled code depends on earlier compilations."""
    code = f"from {__name__} import compare_compiled_in_one_process as run; run()"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
