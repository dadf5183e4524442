"""Losses of a head against the target's distribution, as sums over draft positions; the trainer divides them once.

The teacher's logits are recomputed from the target's hidden states, once per target token (see `draft_losses`) for all
depths. The forward pass also computes the gradient with respect to the head's states, so each block of logits can be
freed immediately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtptrain.config import LossKind, TrainConfig
from mtptrain.training.teacher import Teacher, teach
from mtptrain.utils.compile import fused_by_recomputing, mark_width_static

CROSS_ENTROPIES = (LossKind.ce, LossKind.data_ce)


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss: which one to compute, and how."""

    kind: LossKind = LossKind.kl
    lk_eta: float = 3.0
    feature_weight: float = 0.0
    """Loss weight of the smooth L1 distance between the head's and the target's post-norm states, averaged over H."""
    chunk_rows: int = 1536
    """Maximum number of rows in one block of logits [rows, V], which holds all depths of its target tokens."""

    @classmethod
    def of(cls, config: TrainConfig) -> "LossSettings":
        return cls(config.loss, config.lk_eta, config.feature_weight, config.loss_chunk_rows)


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised draft positions of a batch, by depth; divide by `Batch.num_drafts` summed over ranks."""

    loss: torch.Tensor
    """f32[], the sum over depths of scale * losses; carries the gradient."""
    losses: torch.Tensor  # f32[T]
    kl: torch.Tensor  # f32[T], nats
    top1_accuracy: torch.Tensor  # f32[T], drafts whose most likely token is the target's
    overlap: torch.Tensor
    """f32[T], sum min(target_probs, draft_probs): the probability that a sampled draft is accepted."""

    @classmethod
    def joined(cls, parts: "Sequence[LossSums]") -> "LossSums":
        """Returns the sums of all depths from those of consecutive groups of depths."""
        names = ("losses", "kl", "top1_accuracy", "overlap")
        loss = torch.stack([part.loss for part in parts]).sum()
        return cls(loss, *(torch.cat([getattr(part, name) for part in parts]) for name in names))


def draft_losses(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    target_states: torch.Tensor,
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    is_draft: torch.Tensor,
    scale: torch.Tensor,
    settings: LossSettings,
    draft_token_ids: torch.Tensor | None = None,
    data_tokens: torch.Tensor | None = None,
) -> LossSums:
    """Compare every draft with the target's distribution.

    The target token of depth k at draft position t is token t + 1 + k: the target's state there gives the distribution
    to learn. Depth 0 at draft position t + k has the same target token, so all depths share the teacher. With only one
    depth in `states`, the draft positions need not be consecutive.

    If the head has its own vocabulary, the target's probabilities are not renormalised over it. The probability mass
    outside it is added to the KL. If the target's most likely token is outside it, the top-1 prediction is wrong.

    Args:
        states: the head's states [T, M, H].
        lm_head: the head's own lm_head [D, H], or the target's frozen one [V, H].
        target_states: the target's post-norm states at the target tokens of the first depth in `states` [M, H].
        target_logits: returns the target's logits [C, V] for its states [C, H].
        is_draft: whether each depth of each draft position counts, bool [T, M]. A draft position that counts at a depth
            counts at all smaller depths.
        scale: weight of each depth's sum in the loss [T].
        settings: which loss to compute, and how.
        draft_token_ids: increasing target token ids i64[D] that form the head's own vocabulary; None if it has none.
        data_tokens: the data's token that the first depth should predict at each draft position i64[M]; only for
            `LossKind.data_ce`.
    """
    if data_tokens is not None and draft_token_ids is not None:
        data_tokens = draft_ids_of(data_tokens, draft_token_ids)
    loss, sums = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        states, lm_head, target_states, target_logits, is_draft, scale, settings, draft_token_ids, data_tokens
    )
    return LossSums(loss, *sums.unbind())


def draft_ids_of(tokens: torch.Tensor, draft_token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of each token [M] in the sorted draft vocabulary i64[D]; -1 for tokens outside it."""
    index = torch.searchsorted(draft_token_ids, tokens).clamp(max=len(draft_token_ids) - 1)
    return torch.where(draft_token_ids[index] == tokens, index, -1)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        target_states: torch.Tensor,
        target_logits: Callable[[torch.Tensor], torch.Tensor],
        is_draft: torch.Tensor,
        scale: torch.Tensor,
        settings: LossSettings,
        draft_token_ids: torch.Tensor | None,
        data_tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_depths, num_drafts, _ = states.shape
        num_positions = max(1, settings.chunk_rows // num_depths)
        if num_positions > 4:
            num_positions -= num_positions % 4  # matmuls with other numbers of rows take 5 to 8 % longer on a CPU
        grad_states = torch.zeros_like(states)  # stays zero for drafts that have no teacher
        grad_lm_head = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        sums = states.new_zeros(4, num_depths, dtype=torch.float32)
        for first in range(0, num_drafts, num_positions):
            target_block = target_states[first : first + num_positions]
            teacher = teach(target_logits(target_block), draft_token_ids)
            slots = drafts_of_block(first, len(target_block), num_depths)
            block = at_targets(states, slots, len(target_block))  # [T, C, H]
            is_counted = at_targets(is_draft, slots, len(target_block))  # [T, C]
            block_states = block.flatten(0, 1)
            data_block = None if data_tokens is None else data_tokens[first : first + num_positions]
            logits = F.linear(block_states, lm_head)
            block_sums, grad_logits = compare(
                logits, is_counted.flatten(), teacher, scale, settings.kind, settings.lk_eta, data_block
            )
            grad = (grad_logits @ lm_head).view_as(block)
            if grad_lm_head is not None:
                grad_lm_head += grad_logits.T @ block_states
            if settings.feature_weight:
                feature_sums, feature_grad = compare_features(
                    block, is_counted, target_block, scale, settings.feature_weight
                )
                block_sums[0] += feature_sums
                grad += feature_grad
            sums += block_sums
            for depth, (drafts, in_block) in enumerate(slots):
                grad_states[depth, drafts] = grad[depth, in_block]
            del teacher, grad_logits  # [rows, V] each: free them before the next block
        ctx.save_for_backward(grad_states, *([] if grad_lm_head is None else [grad_lm_head]))
        ctx.mark_non_differentiable(sums)
        return (sums[0] * scale).sum(), sums

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_states, *grad_lm_head = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_own = (grad_lm_head[0] * grad_loss).to(grad_states.dtype) if grad_lm_head else None
        # Overwriting the saved gradient is safe, because torch refuses a second backward pass.
        return grad_states.mul_(grad_loss.to(grad_states.dtype)), grad_own, *[None] * 7


def drafts_of_block(first: int, num_positions: int, num_depths: int) -> list[tuple[slice, slice]]:
    """Returns, for each depth, the drafts whose target tokens are in the block at `first`, and their slots in it.

    If a depth has fewer drafts than the block has slots, its drafts take the last slots.
    """
    drafts = [(max(0, first - depth), max(0, first + num_positions - depth)) for depth in range(num_depths)]
    return [(slice(start, stop), slice(num_positions - (stop - start), num_positions)) for start, stop in drafts]


def at_targets(x: torch.Tensor, slots: Sequence[tuple[slice, slice]], num_positions: int) -> torch.Tensor:
    """Moves the drafts [T, M, ...] of a block to the slots of their target tokens [T, C, ...]; empty slots are 0."""
    block = x.new_zeros(len(x), num_positions, *x.shape[2:])
    for depth, (drafts, in_block) in enumerate(slots):
        block[depth, in_block] = x[depth, drafts]
    return block


def compare(
    logits: torch.Tensor,
    is_counted: torch.Tensor,
    teacher: Teacher,
    scale: torch.Tensor,
    kind: LossKind,
    lk_eta: float,
    data_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the logits of drafts with their teacher; rows whose `is_counted` is false contribute nothing.

    Args:
        logits: the logits of all depths, concatenated [T * C, D].
        is_counted: whether each row counts, bool [T * C].
        teacher: the distributions of C target tokens, the same for every depth.
        scale: weight of each depth in the loss [T].
        kind: the kind of loss.
        lk_eta: `train.lk_eta`, for `LossKind.lk`.
        data_tokens: the data's own tokens [C] for `LossKind.data_ce`, -1 if outside the head's vocabulary.

    Returns:
        Sums over rows of the loss, KL, top-1 accuracy and overlap [4, T], and the gradient of the weighted loss with
        respect to the logits [T * C, D] in their dtype.
    """
    num_depths = len(scale)
    tokens = teacher.tokens.repeat(num_depths)
    labels = tokens if data_tokens is None else data_tokens.repeat(num_depths)
    mass = None if teacher.mass is None else teacher.mass.repeat(num_depths)  # [T * C]
    weights = is_counted * scale.repeat_interleave(len(is_counted) // num_depths)
    largest, total, product, overlap, grad = _rows_and_grad(
        mark_width_static(logits),
        mark_width_static(teacher.values),
        teacher.log_total,
        labels,
        mass,
        weights,
        num_depths,
        kind,
        lk_eta,
    )
    log_total, at_token = total.log(), _at(logits, tokens)
    cross = -product if teacher.negative_entropy is None else teacher.negative_entropy.repeat(num_depths) - product
    kl = cross + log_total
    if mass is not None:
        kl = kl + (1 - mass) * (1 - log_total)  # weights log_total by mass, and adds the mass outside the vocabulary
    agrees = (at_token == largest) & (tokens >= 0)
    if kind in CROSS_ENTROPIES:
        at_label = at_token if labels is tokens else _at(logits, labels)
        loss = torch.where(labels >= 0, largest + log_total - at_label, 0.0)
    elif kind == LossKind.lk:
        weight = torch.exp(-lk_eta * overlap)
        loss = weight * kl + (1 - weight) * (1 - overlap)
    else:
        loss = kl
    rows = torch.stack([loss, kl, agrees.float(), overlap]) * is_counted  # [4, T * C]
    return rows.unflatten(1, (num_depths, -1)).sum(-1), grad


def _at(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logit of each row's token f32[R]; arbitrary where the token is -1."""
    return logits.gather(-1, tokens.clamp(min=0)[:, None])[:, 0].float()


@fused_by_recomputing
def _rows_and_grad(
    logits: torch.Tensor,
    teacher_values: torch.Tensor,
    teacher_log_total: torch.Tensor | None,
    tokens: torch.Tensor,
    mass: torch.Tensor | None,
    weights: torch.Tensor,
    num_depths: int,
    kind: LossKind,
    lk_eta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes, in one compiled function, everything that `compare` needs from whole rows of logits.

    With e = exp(logits - largest logit), it returns for each row f32[T * C]: the largest logit, sum e, the sum of
    target_probs * log e (or of target_probs * (log e - log target_probs) if the teacher holds logits), and the overlap.
    The last value is the gradient of the weighted loss [T * C, D].

    A row stays in a CPU core's cache as in `teacher._softmax`, except with `LossKind.lk`, whose gradient depends on the
    overlap of the whole row. `num_depths` is an argument because torch.compile does not guard on a quotient of sizes:
    if it were computed from the shapes, it would be wrong when compiled code is reused for another number of depths.
    """
    values = teacher_values.expand(num_depths, -1, -1).reshape(logits.shape)
    if teacher_log_total is None:
        probs, log_probs = values, None
    else:
        log_probs = values.float() - teacher_log_total.repeat(num_depths)[:, None]
        probs = log_probs.exp()
    wide = logits.float()
    largest = wide.amax(-1, keepdim=True)
    shifted = wide - largest
    exps = shifted.exp()
    total = exps.sum(-1, keepdim=True)
    drafted = exps / total
    overlap = torch.minimum(probs, drafted).sum(-1)
    if kind in CROSS_ENTROPIES:
        is_token = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None]
        grad = (drafted - is_token.float()) * (tokens >= 0)[:, None]
    else:
        grad = (drafted if mass is None else drafted * mass[:, None]) - probs
    if kind == LossKind.lk:
        weight = torch.exp(-lk_eta * overlap)[:, None]
        # Where draft_probs < target_probs, the overlap depends on draft_probs.
        short = torch.where(drafted < probs, drafted, 0.0)
        grad = weight * grad + (1 - weight) * (drafted * short.sum(-1, keepdim=True) - short)
    product = (probs * (shifted if log_probs is None else shifted - log_probs)).sum(-1)
    return largest[:, 0], total[:, 0], product, overlap, (grad * weights[:, None]).to(logits.dtype)


def compare_features(
    states: torch.Tensor, is_counted: torch.Tensor, target_states: torch.Tensor, scale: torch.Tensor, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the head's states [T, C, H] with the target's states [C, H] by smooth L1 distance, averaged over H.

    Returns:
        The distances of each depth [T], summed over rows and multiplied by `weight`, and the gradient with respect to
        the head's states, in which each depth is also multiplied by its `scale`.
    """
    difference = states.float() - target_states.float()
    distance = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none").mean(-1)  # [T, C]
    grad = difference.clamp(-1, 1) * (is_counted * scale[:, None] * (weight / states.shape[-1]))[..., None]
    return (distance * is_counted).sum(-1) * weight, grad.to(states.dtype)
