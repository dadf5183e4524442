"""Losses of a head against the target's distribution, as sums and counts; the division happens once, in the trainer.

The teacher's logits are recomputed from the target's hidden state, once per position for all depths, and the gradient of the head's
states is written in the forward pass: no logits outlive their block of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised drafts of a batch, by depth; divide by `Batch.num_drafts` summed over ranks."""

    loss: torch.Tensor
    """f32[], the sum over depths of scale * KL; carries the gradient."""
    kl: torch.Tensor  # f32[T], nats
    agreement: torch.Tensor  # f32[T], drafts whose most likely token is the target's


def kl_to_target(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    target_states: torch.Tensor,
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    supervised_positions: torch.Tensor,
    is_draft: torch.Tensor,
    scale: torch.Tensor,
    chunk_rows: int,
    draft_token_ids: torch.Tensor | None = None,
) -> LossSums:
    """Forward KL from the target's distribution to the head's.

    Depth k of row t is taught by the target's distribution at position t + 1 + k. A head with a vocabulary of its own is taught by
    the target's probabilities as they are, not renormalised: the mass that it cannot draft is added to the loss, and a target
    token outside is a miss.

    Args:
        states: of the head [T, N, H].
        lm_head: the head's [D, H] or the target's frozen [V, H].
        target_states: post-norm states of the target [N, H].
        target_logits: gives the target's logits [C, V] of its states [C, H].
        supervised_positions: positions of teachers, those with at least one draft [M].
        is_draft: where depth k of row t counts, bool [T, N].
        scale: weight of each depth's sum in the loss [T].
        chunk_rows: rows C of one block of logits.
        draft_token_ids: the target's ids of the head's vocabulary i64[D], where it has one of its own.
    """
    loss, kl, agreement = _ChunkedKl.apply(  # type: ignore[no-untyped-call]
        states, lm_head, target_states, target_logits, supervised_positions, is_draft, scale, chunk_rows, draft_token_ids
    )
    return LossSums(loss, kl, agreement)


class _ChunkedKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        target_states: torch.Tensor,
        target_logits: Callable[[torch.Tensor], torch.Tensor],
        supervised_positions: torch.Tensor,
        is_draft: torch.Tensor,
        scale: torch.Tensor,
        chunk_rows: int,
        draft_token_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_depths, num_tokens, _ = states.shape
        grad_states = torch.zeros_like(torch.cat([states, states[:, :1]], 1))  # one more row, for rows that do not count
        grad_lm_head = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        kl, agreement = states.new_zeros(2, num_depths, dtype=torch.float32)
        for positions in supervised_positions.split(chunk_rows):
            teacher = Teacher.of(target_logits(target_states[positions]), draft_token_ids)
            for depth in range(num_depths):
                rows = positions - 1 - depth
                counts = is_draft[depth, rows.clamp(min=0)] & (rows >= 0)  # [C]
                row_states = states[depth, rows.clamp(min=0)]  # [C, H]
                row_kl, agrees, grad_logits = teacher.compare(F.linear(row_states, lm_head).float())
                kl[depth] += (row_kl * counts).sum()
                agreement[depth] += (agrees & counts).sum()
                grad_rows = grad_logits.to(lm_head.dtype)  # [C, D]
                grad_states[depth].index_copy_(0, torch.where(counts, rows, num_tokens), grad_rows @ lm_head)
                if grad_lm_head is not None:
                    grad_lm_head += (grad_rows * counts[:, None]).T @ row_states * scale[depth]
        ctx.save_for_backward(grad_states[:, :num_tokens], scale, *([] if grad_lm_head is None else [grad_lm_head]))
        ctx.mark_non_differentiable(kl, agreement)
        return (kl * scale).sum(), kl, agreement

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_states, scale, *grad_lm_head = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype = grad_states.dtype
        grad_own = (grad_lm_head[0] * grad_loss).to(dtype) if grad_lm_head else None
        return grad_states * (grad_loss * scale)[:, None, None].to(dtype), grad_own, *[None] * 7


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at a block of positions over the head's vocabulary, in fp32, shared by all depths."""

    probs: torch.Tensor  # [C, D]
    negative_entropy: torch.Tensor  # [C], the sum of p log p over the head's vocabulary
    tokens: torch.Tensor  # [C], the most likely ones; -1 outside the head's vocabulary
    mass: torch.Tensor | None  # [C], of the target within the head's vocabulary; None where it is the target's

    @staticmethod
    def of(logits: torch.Tensor, draft_token_ids: torch.Tensor | None = None) -> "Teacher":
        """From the target's logits [C, V]."""
        logprobs = logits.float().log_softmax(-1)
        tokens, mass = logprobs.argmax(-1), None
        if draft_token_ids is not None:
            is_in = draft_token_ids == tokens[:, None]  # [C, D]
            tokens = torch.where(is_in.any(-1), is_in.int().argmax(-1), -1)
            logprobs = logprobs[:, draft_token_ids]
            mass = logprobs.exp().sum(-1)
        probs = logprobs.exp()
        return Teacher(probs, (probs * logprobs).sum(-1), tokens, mass)

    def compare(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A draft's logits [C, D] with the teacher.

        Returns:
            KL(teacher || softmax(logits)) plus the teacher's mass that cannot be drafted [C], whether the most likely tokens
            agree [C], and the gradient of the first [C, D].
        """
        probs, largest = logits.softmax(-1), logits.amax(-1)
        lse = largest - probs.amax(-1).log()
        agrees = (logits.gather(-1, self.tokens.clamp(min=0)[:, None])[:, 0] == largest) & (self.tokens >= 0)
        cross_entropy = -torch.linalg.vecdot(self.probs, logits)
        if self.mass is None:
            return self.negative_entropy + cross_entropy + lse, agrees, probs.sub_(self.probs)
        kl = self.negative_entropy + cross_entropy + self.mass * lse + (1 - self.mass)
        return kl, agrees, probs.mul_(self.mass[:, None]).sub_(self.probs)
