"""The forward pass of training, from stored states to losses, used by the trainer, the planner and held-out losses."""

from typing import TYPE_CHECKING

import torch

from mtptrain.config import LossKind
from mtptrain.heads.base import Head
from mtptrain.heads.packing import PackedTokens
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.losses import LossSettings, LossSums, draft_losses
from mtptrain.utils.clock import PhaseClock

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def training_losses(
    model: "Head | DeepSpeedEngine",
    parts: FrozenParts,
    batch: Batch,
    scale: torch.Tensor,
    settings: LossSettings,
    clock: PhaseClock,
) -> LossSums:
    """Run a head over a batch and compare every draft with the target's distribution.

    Args:
        model: the trained head, alone or in its DeepSpeed engine.
        parts: the target's frozen parts.
        batch: a batch on the head's device, with decoded states.
        scale: weight of each depth's sum in the loss [T].
        settings: which loss to compute, and how.
        clock: accumulates the seconds of the phases `forward` and `loss`.
    """
    head: Head = model if isinstance(model, Head) else model.module
    num_depths = len(batch.is_draft)
    with clock.phase("forward"):
        # 1. A head that reads residual streams gets them [N, L, H]; other heads get the post-norm states [N, H].
        if head.read_layers:
            last_stream = batch.hidden_states[:, None]  # [N, 1, H]
            read_states = last_stream if batch.aux_hidden_states is None else batch.aux_hidden_states
        else:
            read_states = parts.final_norm(batch.hidden_states)
        # 2. Run the head at every depth [T, M, H].
        states = model(PackedTokens(read_states, batch.input_ids, batch.next_ids, batch.packing), parts, num_depths)
    with clock.phase("loss"):
        # 3. Depth k of draft position t learns the target's distribution of token t + 2 + k, which follows from the
        # target's post-norm state at t + 1 + k. Compute the losses of depths with the same target tokens together.
        together = num_depths if batch.packing.depths_share_targets else 1
        # The gradient of a split is a copy, so all depths together are not split.
        groups = [states] if together == num_depths else states.split(together)
        sums = []
        for first, group in zip(range(0, num_depths, together), groups, strict=True):
            depths = slice(first, first + together)
            targets = (batch.packing.draft_positions + 1 + first).clamp(max=batch.num_tokens - 1)  # [M]
            sums.append(
                draft_losses(
                    group,
                    head.output_weight(parts),
                    parts.final_norm(batch.hidden_states[targets]) if head.read_layers else read_states[targets],
                    parts.logits,
                    batch.is_draft[depths],
                    scale[depths],
                    settings,
                    head.draft_token_ids,
                    batch.next_ids[targets] if settings.kind is LossKind.data_ce else None,
                )
            )
        return LossSums.joined(sums)
