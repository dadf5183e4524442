"""Losses of a head against the target's distribution, as sums and counts; the division happens once, in the trainer.

The teacher's logits are recomputed from the target's hidden state, once per position for all depths, and the gradient of the head's
states is written in the forward pass, since lm_head is frozen: no logits outlive their block of rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised drafts of a batch, by depth; divide by `Batch.num_drafts` summed over ranks."""

    kl: torch.Tensor  # f32[T], nats; carries the gradient
    agreement: torch.Tensor  # f32[T], drafts whose most likely token is the target's


def kl_to_target(
    states: torch.Tensor,
    target_states: torch.Tensor,
    lm_head: torch.Tensor,
    supervised_positions: torch.Tensor,
    is_draft: torch.Tensor,
    chunk_rows: int,
) -> LossSums:
    """Forward KL from the target's distribution to the head's.

    Depth k of row t is taught by the target's distribution at position t + 1 + k.

    Args:
        states: of the head [T, N, H].
        target_states: post-norm states of the target [N, H].
        lm_head: the frozen head weight [V, H].
        supervised_positions: positions of teachers, those with at least one draft [M].
        is_draft: where depth k of row t counts, bool [T, N].
        chunk_rows: rows of one block of logits.

    Returns:
        Sums by depth.
    """
    kl, agreement = _ChunkedKl.apply(  # type: ignore[no-untyped-call]
        states, target_states, lm_head, supervised_positions, is_draft, chunk_rows
    )
    return LossSums(kl, agreement)


class _ChunkedKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,
        target_states: torch.Tensor,
        lm_head: torch.Tensor,
        supervised_positions: torch.Tensor,
        is_draft: torch.Tensor,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_states = torch.zeros_like(states)
        kl, agreement = states.new_zeros(2, len(states), dtype=torch.float32)
        for positions in supervised_positions.split(chunk_rows):
            teacher = F.linear(target_states[positions], lm_head)  # [C, V]
            teacher_logprobs, teacher_tokens = teacher.float().log_softmax(-1), teacher.argmax(-1)
            for depth in range(len(states)):
                rows = positions - 1 - depth
                counts = is_draft[depth, rows.clamp(min=0)] & (rows >= 0)  # [C]
                rows = rows.clamp(min=0)
                logits = F.linear(states[depth, rows], lm_head)  # [C, V]
                row_kl, grad_logits = kl_and_gradient(logits, teacher_logprobs)
                kl[depth] += (row_kl * counts).sum()
                agreement[depth] += ((logits.argmax(-1) == teacher_tokens) & counts).sum()
                grad_rows = (grad_logits.to(lm_head.dtype) @ lm_head) * counts[:, None]  # [C, H]
                grad_states[depth].index_add_(0, rows, grad_rows.to(states.dtype))
        ctx.save_for_backward(grad_states)
        ctx.mark_non_differentiable(agreement)
        return kl, agreement

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_kl: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (grad_states,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_states * grad_kl[:, None, None].to(grad_states.dtype), None, None, None, None, None


def kl_and_gradient(logits: torch.Tensor, teacher_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(teacher || softmax(logits)) per row [C] and its gradient with respect to the logits [C, V], in fp32."""
    logprobs = logits.float().log_softmax(-1)
    teacher = teacher_logprobs.exp()
    return (teacher * (teacher_logprobs - logprobs)).sum(-1), logprobs.exp() - teacher
