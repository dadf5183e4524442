"""The chunked loss against the plain formula with all logits alive."""

import pytest
import torch
import torch.nn.functional as F

from mtptrain.losses import LossSums, kl_to_target

T, N, H, V = 3, 40, 16, 50


def inputs(supervised: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(T, N, H, generator=generator).requires_grad_()
    target_states, lm_head = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator)
    is_draft = torch.rand(T, N, generator=generator) < supervised
    for depth in range(T):
        is_draft[depth, N - 1 - depth :] = False  # no teacher behind the end
    is_teacher = torch.zeros(N, dtype=torch.bool)
    for depth in range(T):
        is_teacher |= torch.roll(is_draft[depth], 1 + depth)
    return states, target_states, lm_head, is_teacher.nonzero()[:, 0], is_draft


def plain_kl(states: torch.Tensor, target_states: torch.Tensor, lm_head: torch.Tensor, is_draft: torch.Tensor) -> torch.Tensor:
    teacher = (target_states @ lm_head.T).log_softmax(-1)
    sums = []
    for depth in range(T):
        rows = is_draft[depth].nonzero()[:, 0]
        logprobs = (states[depth, rows] @ lm_head.T).log_softmax(-1)
        sums.append(F.kl_div(logprobs, teacher[rows + 1 + depth], reduction="sum", log_target=True))
    return torch.stack(sums)


def run_kl(
    states: torch.Tensor,
    target_states: torch.Tensor,
    lm_head: torch.Tensor,
    positions: torch.Tensor,
    is_draft: torch.Tensor,
    chunk_rows: int = 16,
    scale: torch.Tensor | None = None,
) -> LossSums:
    """With the target's own lm_head."""
    scale = torch.ones(T) if scale is None else scale
    return kl_to_target(states, lm_head, target_states, lambda x: x @ lm_head.T, positions, is_draft, scale, chunk_rows)


@pytest.mark.parametrize("supervised", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_chunked_kl_and_its_gradient_equal_the_plain_formula(supervised: float, chunk_rows: int) -> None:
    states, target_states, lm_head, positions, is_draft = inputs(supervised)
    weights = torch.tensor([0.5, 0.3, 0.2])
    ours = run_kl(states, target_states, lm_head, positions, is_draft, chunk_rows, weights)
    reference = plain_kl(states, target_states, lm_head, is_draft)
    torch.testing.assert_close(ours.kl, reference, atol=1e-4, rtol=1e-5)
    (our_grad,) = torch.autograd.grad(ours.loss, states)
    torch.testing.assert_close(ours.loss, (reference * weights).sum(), atol=1e-4, rtol=1e-5)
    (reference_grad,) = torch.autograd.grad((reference * weights).sum(), states)
    torch.testing.assert_close(our_grad, reference_grad, atol=1e-5, rtol=1e-5)


def test_agreement_counts_drafts_whose_most_likely_token_is_the_targets() -> None:
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    with torch.no_grad():
        states[0, : N - 1] = target_states[1:]  # depth 0 knows the answer
    ours = run_kl(states, target_states, lm_head, positions, is_draft)
    assert ours.agreement[0] == is_draft[0].sum()
    assert ours.kl[0].abs() < 1e-3
    assert ours.agreement[1] < 0.2 * is_draft[1].sum()


def test_a_teacher_shifted_by_one_is_caught() -> None:
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    shifted = run_kl(states, torch.roll(target_states, 1, 0), lm_head, positions, is_draft).kl
    assert (shifted - plain_kl(states, target_states, lm_head, is_draft)).abs().min() > 1.0


@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_a_draft_vocabulary_is_taught_by_the_targets_probabilities_as_they_are(chunk_rows: int) -> None:
    """Trap 11: renormalised inside the draft vocabulary, a head that misses every token looks perfect."""
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    ids = torch.arange(0, V, 3)  # 17 of 50 tokens
    own = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.tensor([0.5, 0.3, 0.2])
    ours = kl_to_target(
        states, own, target_states, lambda x: x @ lm_head.T, positions, is_draft, weights, chunk_rows, draft_token_ids=ids
    )
    teacher = (target_states @ lm_head.T).softmax(-1)
    reference, agreement = [], []
    for depth in range(T):
        rows = is_draft[depth].nonzero()[:, 0]
        wanted = teacher[rows + 1 + depth]
        logits = states[depth, rows] @ own.T
        inside = wanted[:, ids]
        kl = (inside * (inside.log() - logits.log_softmax(-1))).sum(-1) + (1 - inside.sum(-1))
        reference.append(kl.sum())
        agreement.append((ids[logits.argmax(-1)] == wanted.argmax(-1)).sum())
    torch.testing.assert_close(ours.kl, torch.stack(reference), atol=1e-3, rtol=1e-5)
    assert ours.agreement.tolist() == [int(count) for count in agreement]
    ours_grads = torch.autograd.grad(ours.loss, (states, own))
    reference_grads = torch.autograd.grad((torch.stack(reference) * weights).sum(), (states, own))
    for our_grad, reference_grad in zip(ours_grads, reference_grads, strict=True):
        torch.testing.assert_close(our_grad, reference_grad, atol=1e-4, rtol=1e-4)


def test_a_target_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    wanted = (target_states @ lm_head.T).argmax(-1)
    outside = torch.tensor([token for token in range(V) if token not in set(wanted.tolist())])
    assert len(outside) > 5
    scale = torch.ones(T)
    ours = kl_to_target(
        states, lm_head[outside], target_states, lambda x: x @ lm_head.T, positions, is_draft, scale, 16, draft_token_ids=outside
    )
    assert ours.agreement.tolist() == [0, 0, 0]
