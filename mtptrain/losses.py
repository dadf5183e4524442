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
        num_depths, num_tokens, _ = states.shape
        grad_states = torch.zeros_like(torch.cat([states, states[:, :1]], 1))  # one more row, for rows that do not count
        kl, agreement = states.new_zeros(2, num_depths, dtype=torch.float32)
        for positions in supervised_positions.split(chunk_rows):
            teacher = Teacher.of(F.linear(target_states[positions], lm_head))
            for depth in range(num_depths):
                rows = positions - 1 - depth
                counts = is_draft[depth, rows.clamp(min=0)] & (rows >= 0)  # [C]
                logits = F.linear(states[depth, rows.clamp(min=0)], lm_head).float()  # [C, V]
                row_kl, agrees, grad_logits = teacher.compare(logits)
                kl[depth] += (row_kl * counts).sum()
                agreement[depth] += (agrees & counts).sum()
                grad_states[depth].index_copy_(0, torch.where(counts, rows, num_tokens), grad_logits.to(lm_head.dtype) @ lm_head)
        grad_states = grad_states[:, :num_tokens]
        ctx.save_for_backward(grad_states)
        ctx.mark_non_differentiable(agreement)
        return kl, agreement

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_kl: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (grad_states,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_states * grad_kl[:, None, None].to(grad_states.dtype), None, None, None, None, None


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at a block of positions, in fp32, shared by all depths."""

    probs: torch.Tensor  # [C, V]
    negative_entropy: torch.Tensor  # [C]
    tokens: torch.Tensor  # [C], the most likely ones

    @staticmethod
    def of(logits: torch.Tensor) -> "Teacher":
        logprobs = logits.float().log_softmax(-1)
        probs = logprobs.exp()
        return Teacher(probs, (probs * logprobs).sum(-1), logprobs.argmax(-1))

    def compare(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A draft's logits [C, V] with the teacher.

        Returns:
            KL(teacher || softmax(logits)) [C], whether the most likely tokens agree [C], and the gradient of the KL [C, V].
        """
        probs, largest = logits.softmax(-1), logits.amax(-1)
        lse = largest - probs.amax(-1).log()
        kl = self.negative_entropy - torch.linalg.vecdot(self.probs, logits) + lse
        agrees = logits.gather(-1, self.tokens[:, None])[:, 0] == largest
        return kl, agrees, probs.sub_(self.probs)
