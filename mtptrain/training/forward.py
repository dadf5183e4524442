"""The forward pass of training, from stored states to losses, used by the trainer and for held-out losses."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mtptrain.config import LossPart
from mtptrain.heads.base import Head
from mtptrain.heads.corrected import Confident, Corrected
from mtptrain.heads.packing import PackedTokens
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.coupled_depths import Agreement, agreement, coupled_parts
from mtptrain.training.loss_blocks import DepthGroup
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

    The model is the head, alone or in its DeepSpeed engine. The batch is on its device, with decoded states, and the
    loss weighs each depth's sum by its `scale` [T]. The clock adds up the seconds of the phases `forward` and `loss`.
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
        packed = PackedTokens(read_states, batch.input_ids, batch.next_ids, batch.packing)
        states = model(packed, parts, num_depths)
        correction = head.correction(packed, states) if isinstance(head, Corrected) else None
    with clock.phase("loss"):
        # 3. Depth k of draft position t learns the target's distribution of token t + 2 + k, which follows from the
        # target's post-norm state at t + 1 + k. Compute the losses of depths with the same target tokens together.
        together, output = num_depths if batch.packing.depths_share_targets else 1, head.output_weight(parts)
        settings = settings.for_vocabulary(len(output), len(parts.lm_head), together, states.is_cuda)
        # The gradient of a split is a copy, so all depths together are not split.
        states_of = [states] if together == num_depths else states.split(together)

        def group_at(first: int) -> DepthGroup:
            depths = slice(first, first + together)
            targets = (batch.packing.draft_positions + 1 + first).clamp(max=batch.num_tokens - 1)
            return DepthGroup(
                states_of[first // together],
                output,
                parts.final_norm(batch.hidden_states[targets]) if head.read_layers else read_states[targets],
                parts.logits,
                batch.is_draft[depths],
                scale[depths],
                head.draft_token_ids,
                batch.next_ids[targets] if LossPart.data_ce in settings.mix else None,
                None if correction is None else replace(correction, features=correction.features[depths]),
            )

        # 4. Parts that couple the depths of a draft position need all depths before the losses of any.
        firsts, coupled = range(0, num_depths, together), None
        if settings.couples_depths and len(firsts) > 1:
            agreements = [agreement(group_at(first), settings.chunk_rows) for first in firsts]
            coupled = coupled_parts(Agreement.joined(agreements), batch.is_draft, scale)
        # 5. Compute the losses.
        sums = []
        for first in firsts:
            depths = slice(first, first + together)
            of_group = None if coupled is None else {part: values.at(depths) for part, values in coupled.items()}
            sums.append(draft_losses(group_at(first), settings, of_group))
        losses = LossSums.joined(sums)
        # 6. A head that says how likely its drafts are to be accepted learns it from their overlaps.
        if LossPart.confidence in settings.mix:
            assert isinstance(head, Confident) and correction is not None
            logits = head.confidence(states, correction)
            errors = F.binary_cross_entropy_with_logits(logits.float(), losses.overlaps, reduction="none")  # [T, M]
            losses = losses.plus((errors * batch.is_draft).sum(1), settings.mix[LossPart.confidence], scale)
        return losses
