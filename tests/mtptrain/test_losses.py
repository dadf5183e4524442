"""The chunked loss against the plain formula with all logits alive."""

import pytest
import torch
import torch.nn.functional as F

from mtptrain.losses import kl_to_target

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


@pytest.mark.parametrize("supervised", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_chunked_kl_and_its_gradient_equal_the_plain_formula(supervised: float, chunk_rows: int) -> None:
    states, target_states, lm_head, positions, is_draft = inputs(supervised)
    ours = kl_to_target(states, target_states, lm_head, positions, is_draft, chunk_rows)
    reference = plain_kl(states, target_states, lm_head, is_draft)
    torch.testing.assert_close(ours.kl, reference, atol=1e-4, rtol=1e-5)
    weights = torch.tensor([0.5, 0.3, 0.2])
    (our_grad,) = torch.autograd.grad((ours.kl * weights).sum(), states)
    (reference_grad,) = torch.autograd.grad((reference * weights).sum(), states)
    torch.testing.assert_close(our_grad, reference_grad, atol=1e-5, rtol=1e-5)


def test_agreement_counts_drafts_whose_most_likely_token_is_the_targets() -> None:
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    with torch.no_grad():
        states[0, : N - 1] = target_states[1:]  # depth 0 knows the answer
    ours = kl_to_target(states, target_states, lm_head, positions, is_draft, 16)
    assert ours.agreement[0] == is_draft[0].sum()
    assert ours.kl[0].abs() < 1e-3
    assert ours.agreement[1] < 0.2 * is_draft[1].sum()


def test_a_teacher_shifted_by_one_is_caught() -> None:
    states, target_states, lm_head, positions, is_draft = inputs(1.0)
    shifted = kl_to_target(states, torch.roll(target_states, 1, 0), lm_head, positions, is_draft, 16).kl
    assert (shifted - plain_kl(states, target_states, lm_head, is_draft)).abs().min() > 1.0
