"""Losses of a head against the target's distribution, as sums over draft positions; the trainer divides them once.

The teacher's logits are recomputed from the target's hidden states, once per target token (see `draft_losses`) for all
depths. The forward pass also computes the gradient with respect to the head's states, so each block of logits can be
freed immediately.

`loss_parts` has the formula of each part of the loss, `loss_blocks` the comparison of a block of drafts with their
teacher, and `coupled_depths` the parts that couple the depths of a draft position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from mtptrain.config import LossPart, TrainConfig
from mtptrain.heads.corrected import Correction
from mtptrain.settings.loss import COUPLED_PARTS, loss_mix
from mtptrain.training.coupled_depths import CoupledPart, agreement, coupled_parts
from mtptrain.training.loss_blocks import DepthGroup, Selected, blocks, compare, corrected_logits, select
from mtptrain.training.loss_parts import Drafted, part_values
from mtptrain.training.teacher import Teacher, teach

MOST_ROWS = 1536
"""The most rows of a block of logits."""
MOST_LOGITS_CPU, MOST_LOGITS_GPU = 1536 * 49_152, 1536 * 163_840
"""The most logits of a block, which has fewer rows with a vocabulary of more than 49,152 or 163,840 tokens. Comparing
them takes up to 40 bytes of memory each without compilation, as on CPUs, and about 9 with it."""


@dataclass(frozen=True)
class LossSettings:
    mix: dict[LossPart, float] = field(default_factory=lambda: {LossPart.kl: 1.0})
    """The weight of each part, above 0."""
    chunk_rows: int = 0
    """Maximum number of rows in one block of logits [rows, V]; 0 stands for what `for_vocabulary` chooses. A block
    holds at least one draft position, with a row per depth. With `head.anchors_per_document`, a block holds rows of one
    depth only."""

    @classmethod
    def of(cls, config: TrainConfig) -> "LossSettings":
        return cls(loss_mix(config.loss, config.feature_weight), config.loss_chunk_rows)

    def for_vocabulary(self, draft_size: int, target_size: int, num_together: int, on_gpu: bool) -> "LossSettings":
        """Returns these settings with a number of rows for the logits of drafts and, once for each `num_together` of
        them, of the target."""
        size, most = max(draft_size, target_size // num_together), MOST_LOGITS_GPU if on_gpu else MOST_LOGITS_CPU
        return self if self.chunk_rows else replace(self, chunk_rows=max(1, min(MOST_ROWS, most // size)))

    @property
    def couples_depths(self) -> bool:
        """Whether a part of the loss couples the depths of a draft position."""
        return any(part in COUPLED_PARTS for part in self.mix)


@dataclass(frozen=True)
class LossSums:
    """Sums over the supervised draft positions of a batch, by depth; divide by `Batch.num_drafts` summed over ranks."""

    loss: torch.Tensor
    """f32[], the sum over depths of scale * losses; carries the gradient."""
    losses: torch.Tensor  # f32[T], the weighted sum of all parts
    kl: torch.Tensor  # f32[T], nats
    top1_accuracy: torch.Tensor  # f32[T], drafts whose most likely token is the target's
    overlap: torch.Tensor
    """f32[T], sum min(target_probs, draft_probs): the probability that a sampled draft is accepted."""
    parts: torch.Tensor  # f32[P, T], each part of the mix, without its weight
    overlaps: torch.Tensor
    """f32[T, M], the overlap of each draft; 0 where it has no teacher."""

    @classmethod
    def joined(cls, parts: "Sequence[LossSums]") -> "LossSums":
        """Returns the sums of all depths from those of consecutive groups of depths."""
        names = ("losses", "kl", "top1_accuracy", "overlap", "parts")
        joined = {name: torch.cat([getattr(part, name) for part in parts], -1) for name in names}
        loss = torch.stack([part.loss for part in parts]).sum()
        return cls(loss, **joined, overlaps=torch.cat([part.overlaps for part in parts]))

    def plus(self, values: torch.Tensor, weight: float, scale: torch.Tensor) -> "LossSums":
        """Returns these sums with a part of the loss added: its sum at each depth f32[T], and its weight in the mix."""
        loss, losses = self.loss + weight * (values * scale).sum(), self.losses + weight * values.detach()
        return replace(self, loss=loss, losses=losses, parts=torch.cat([self.parts, values.detach()[None]]))


def draft_losses(
    group: DepthGroup, settings: LossSettings, coupled: dict[LossPart, CoupledPart] | None = None
) -> LossSums:
    """Compare every draft with the target's distribution.

    If the head has its own vocabulary, the target's probabilities are not renormalised over it. The probability mass
    outside it is added to the KL. If the target's most likely token is outside it, the top-1 prediction is wrong.
    `coupled` has the parts that couple depths, at the depths of the group; None if these are all depths.
    """
    if group.data_tokens is not None and group.draft_token_ids is not None:
        group = replace(group, data_tokens=draft_ids_of(group.data_tokens, group.draft_token_ids))
    if settings.couples_depths and coupled is None:
        coupled = coupled_parts(agreement(group, settings.chunk_rows), group.is_draft, group.scale)
    added = (None, None) if group.correction is None else (group.correction.features, group.correction.weight)
    loss, losses, sums, overlaps = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        group.states, group.lm_head, *added, group, settings, coupled or {}
    )
    kl, top1_accuracy, overlap, *_ = sums
    return LossSums(loss, losses, kl, top1_accuracy, overlap, sums[3:], overlaps)


def draft_ids_of(tokens: torch.Tensor, draft_token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of each token [M] in the draft vocabulary i64[D]; -1 for tokens outside it."""
    order = draft_token_ids.argsort()  # the ids of published heads need not ascend
    index = order[torch.searchsorted(draft_token_ids, tokens, sorter=order).clamp(max=len(order) - 1)]
    return torch.where(draft_token_ids[index] == tokens, index, -1)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        features: torch.Tensor | None,  # those of a `Correction`, and its weight
        codebook: torch.Tensor | None,
        group: DepthGroup,
        settings: LossSettings,
        coupled: dict[LossPart, CoupledPart],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_depths, num_drafts, _ = states.shape
        mix = {part: weight for part, weight in settings.mix.items() if part is not LossPart.confidence}
        # Gradients of states stay zero for drafts that have no teacher; those of weights are summed in fp32.
        grad_states = torch.zeros_like(states)
        grad_lm_head = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        grad_features = None if features is None else torch.zeros_like(features)
        grad_codebook = None if codebook is None else torch.zeros_like(codebook, dtype=torch.float32)
        sums = states.new_zeros(3 + len(mix), num_depths, dtype=torch.float32)
        overlaps = states.new_zeros(num_depths, num_drafts, dtype=torch.float32)
        for block in blocks(num_depths, num_drafts, settings.chunk_rows):
            # 1. Compute the logits of the target and of all drafts.
            target_block = group.target_states[block.targets]
            teacher = teach(group.target_logits(target_block), group.draft_token_ids)
            states_block = block.at_targets(states)  # [T, C, H]
            is_counted = block.at_targets(group.is_draft)  # [T, C]
            rows = states_block.flatten(0, 1)  # [T * C, H]
            correction = group.correction_at(block)
            # 2. Compare them. Each part that depends on logits gives its gradient the weight of the draft.
            weights = is_counted.flatten() * group.scale.repeat_interleave(block.size)  # [T * C]
            weight_of: dict[LossPart, torch.Tensor] = {
                part: (block.at_targets(coupled[part].weights).flatten() if part in coupled else weights) * weight
                for part, weight in mix.items()
                if part is not LossPart.features
            }
            data_block = None if group.data_tokens is None else group.data_tokens[block.targets]
            drafted, selected = compare_drafts(
                corrected_logits(rows, lm_head, correction),
                correction,
                teacher,
                weight_of,
                num_depths,
                data_block,
            )
            # 3. Turn the gradients with respect to the logits into those of the states and of trained weights.
            if drafted.gradient is None:
                grad = torch.zeros_like(states_block)
            else:
                grad = (drafted.gradient @ lm_head).view_as(states_block)
                if grad_lm_head is not None:
                    grad_lm_head += drafted.gradient.T @ rows
                if correction is not None:
                    assert grad_features is not None and grad_codebook is not None
                    grad_rows = grad_of_correction(drafted.gradient, selected, correction, grad_codebook)
                    block.write(grad_rows.unflatten(0, (num_depths, -1)), grad_features)
            values = []
            for part, weight in mix.items():
                if part is LossPart.features:
                    value, feature_grad = compare_features(states_block, is_counted, target_block, group.scale, weight)
                    grad += feature_grad
                elif part in coupled:
                    value = block.at_targets(coupled[part].values).flatten()
                elif part is LossPart.selector:
                    assert selected is not None
                    value = selected.kl
                else:
                    value = part_values(drafted, part)
                values.append(value)
            made = drafted if selected is None else selected  # the drafts as they are made
            figures = torch.stack([drafted.kl, made.is_right.float(), made.overlap, *values])
            sums += (figures * is_counted.flatten()).unflatten(1, (num_depths, -1)).sum(-1)
            block.write(grad, grad_states)
            block.write(made.overlap.unflatten(0, (num_depths, -1)), overlaps)
            del teacher, drafted, made  # [rows, V] each: free them before the next block
        losses = sums.new_zeros(num_depths)
        for weight, values in zip(mix.values(), sums[3:], strict=True):
            losses = losses + weight * values
        dtypes = [None if x is None else x.dtype for x in (states, lm_head, features, codebook)]
        ctx.dtypes = dtypes  # type: ignore[attr-defined]
        ctx.save_for_backward(grad_states, grad_lm_head, grad_features, grad_codebook)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(losses, sums, overlaps)
        return (losses * group.scale).sum(), losses, sums, overlaps

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_states, *others = ctx.saved_tensors  # type: ignore[attr-defined]
        grads = [
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(others, ctx.dtypes[1:], strict=True)  # type: ignore[attr-defined]
        ]
        # Overwriting the saved gradient is safe, because torch refuses a second backward pass.
        return grad_states.mul_(grad_loss.to(grad_states.dtype)), *grads, None, None, None


def compare_drafts(
    logits: torch.Tensor,
    correction: Correction | None,
    teacher: Teacher,
    weights: dict[LossPart, torch.Tensor],
    num_depths: int,
    data_tokens: torch.Tensor | None,
) -> tuple[Drafted, Selected | None]:
    """Compare the logits of a block with their teacher; if drafts are chosen among candidates, compare these too.

    The gradient of the candidates' scores is added to that of the logits. The arguments are those of `compare` and
    `select`.
    """
    others: dict[LossPart, torch.Tensor] = {
        part: weight for part, weight in weights.items() if part is not LossPart.selector
    }
    drafted = compare(logits, teacher, others, num_depths, data_tokens)
    if correction is None or correction.num_candidates is None:
        return drafted, None
    weight = weights.get(LossPart.selector, logits.new_zeros(len(logits), dtype=torch.float32))
    selected = select(logits, correction, teacher, num_depths, weight)
    if LossPart.selector not in weights:
        return drafted, selected
    gradient = torch.zeros_like(logits) if drafted.gradient is None else drafted.gradient
    gradient.scatter_add_(1, selected.candidates, selected.gradient.to(gradient.dtype))
    return drafted._replace(gradient=gradient), selected


def grad_of_correction(
    gradient: torch.Tensor, selected: Selected | None, correction: Correction, grad_codebook: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of a correction's features [R, r], and adds that of its weight to `grad_codebook` f32[D, r].

    `gradient` is that of all logits [R, D]. Drafts are `selected` among candidates, if only these are corrected.
    """
    features, codebook = correction.features, correction.weight
    if selected is None:
        grad_codebook += gradient.T @ features
        return gradient @ codebook
    of_scores = selected.gradient.to(features.dtype)[..., None]  # [R, C, 1]
    grad_codebook.index_add_(0, selected.candidates.flatten(), (of_scores * features[:, None]).flatten(0, 1).float())
    return (of_scores * codebook[selected.candidates]).sum(1)


def compare_features(
    states: torch.Tensor, is_counted: torch.Tensor, target_states: torch.Tensor, scale: torch.Tensor, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the head's states [T, C, H] with the target's states [C, H] by smooth L1 distance, averaged over H.

    Returns the distance of each draft [T * C], and the gradient with respect to the head's states, in which each depth
    is multiplied by its `scale`, and all by `weight`.
    """
    difference = states.float() - target_states.float()
    distance = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none").mean(-1)  # [T, C]
    grad = difference.clamp(-1, 1) * (is_counted * scale[:, None] * (weight / states.shape[-1]))[..., None]
    return distance.flatten(), grad.to(states.dtype)
