"""The forward pass of training, from stored states to losses, used by the trainer and the planner."""

from collections.abc import Callable

import torch

from mtptrain.config import LossKind
from mtptrain.heads.base import Head
from mtptrain.heads.packing import PackedTokens
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.losses import LossSettings, LossSums, draft_losses
from mtptrain.utils.clock import PhaseClock


def training_losses(
    head: Head,
    parts: FrozenParts,
    batch: Batch,
    scale: torch.Tensor,
    settings: LossSettings,
    clock: PhaseClock,
    call_head: Callable[..., torch.Tensor] | None = None,
) -> LossSums:
    """Run a head over a batch and compare every draft with the target's distribution.

    Args:
        head: the trained head.
        parts: the target's frozen parts.
        batch: a batch on the head's device, with decoded states.
        scale: weight of each depth's sum in the loss [T].
        settings: which loss to compute, and how.
        clock: accumulates the seconds of the phases `forward` and `loss`.
        call_head: called in place of the head, for example the DeepSpeed engine that wraps it.
    """
    with clock.phase("forward"):
        # 1. Depth 0 of draft position t learns the target's distribution of token t + 2, which follows from its state
        # at t + 1. Apply the final norm to these states [M, H]. A head that reads residual streams gets them
        # [N, L, H]; other heads get the post-norm states of all tokens [N, H].
        target_positions = batch.packing.draft_positions + 1  # [M]
        if head.read_layers:
            last_stream = batch.hidden_states[:, None]  # [N, 1, H]
            read_states = last_stream if batch.aux_hidden_states is None else batch.aux_hidden_states
            target_states = parts.final_norm(batch.hidden_states[target_positions])
        else:
            read_states = parts.final_norm(batch.hidden_states)
            target_states = read_states[target_positions]
        # 2. Run the head at every depth [T, M, H].
        tokens = PackedTokens(read_states, batch.input_ids, batch.next_ids, batch.packing)
        states = (call_head or head)(tokens, parts, len(batch.is_draft))
    with clock.phase("loss"):
        # 3. Compute the losses, with the head's own lm_head if it has one.
        weight, ids = head.output_weight(parts), head.draft_token_ids
        if not batch.packing.has_spans:
            return _losses_by_depth(states, weight, parts, batch, scale, settings, ids)
        return draft_losses(
            states,
            weight,
            target_states,
            parts.logits,
            batch.is_draft,
            scale,
            settings,
            ids,
            batch.next_ids[target_positions] if settings.kind is LossKind.data_ce else None,
        )


def _losses_by_depth(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    parts: FrozenParts,
    batch: Batch,
    scale: torch.Tensor,
    settings: LossSettings,
    draft_token_ids: torch.Tensor | None,
) -> LossSums:
    """Compute the losses of each depth separately, for draft positions that do not form spans of consecutive tokens."""
    by_depth, last = [], batch.num_tokens - 1
    for depth, depth_states in enumerate(states.unbind()):
        target_positions = (batch.packing.draft_positions + 1 + depth).clamp(max=last)
        target_states, this_depth = parts.final_norm(batch.hidden_states[target_positions]), slice(depth, depth + 1)
        is_draft, depth_scale = batch.is_draft[this_depth], scale[this_depth]
        arguments = target_states, parts.logits, is_draft, depth_scale, settings, draft_token_ids
        data_tokens = batch.next_ids[target_positions] if settings.kind is LossKind.data_ce else None
        by_depth.append(draft_losses(depth_states[None], lm_head, *arguments, data_tokens))
    names = ("losses", "kl", "top1_accuracy", "overlap")
    loss = torch.stack([sums.loss for sums in by_depth]).sum()
    return LossSums(loss, *(torch.cat([getattr(sums, name) for sums in by_depth]) for name in names))
