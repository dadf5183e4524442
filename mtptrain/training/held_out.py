"""Losses by depth on held-out prompts: the training forward over the answers that the target gave to them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtptrain.decoding.speculate import Generation
from mtptrain.heads.base import Head
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.target.model import Target
from mtptrain.training.batches import make_batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import eager
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.figures import Figure, shares

Answered = tuple[list[int], Generation]
"""A prompt and the target's answer."""


@dataclass(frozen=True)
class HeldOutLosses:
    """Means over the drafts that count at each depth, those of tokens of the answers, and the number of these drafts.

    A mean without drafts is None. The head reads the target's tokens, never its own drafts (teacher forcing).
    """

    loss_at: list[Figure]
    kl_at: list[Figure]
    """Nats."""
    top1_accuracy_at: list[Figure]
    """Share of draft positions at which the head's most likely token is also the target's."""
    overlap_at: list[Figure]
    """Mean of sum min(target_probs, draft_probs): the probability that a sampled draft is accepted."""
    num_drafts_at: list[int]
    """Number of drafts that count, summed over all ranks."""


@torch.no_grad()
@eager()  # every answer has its own length
def held_out_losses(
    head: Head, target: Target, answered: Iterable[Answered], ttt_steps: int, settings: LossSettings, ranks: Ranks
) -> HeldOutLosses | None:
    """Returns the losses of a head on the target's answers to this rank's prompts, computed as in training.

    The target reads each prompt and answer again to compute their hidden states. Sums and counts are added up over all
    ranks, then divided once. Returns None for an fp32 target on a GPU, where the training forward has no attention
    kernel for fp32.
    """
    if target.device.type == "cuda" and target.parts.embed_tokens.dtype == torch.float32:
        return None
    sums = torch.zeros(5, ttt_steps, dtype=torch.float64, device=target.device)
    ones = torch.ones(ttt_steps, device=target.device)
    for prompt, generation in answered:
        if len(generation.tokens) < 2:
            continue  # an answer of one token has no draft
        document = read_by_target(head, target, prompt, generation.tokens)
        batch = make_batch([document], ttt_steps, window=head.shared_window).to(
            target.device, target.parts.embed_tokens.dtype
        )
        losses = training_losses(head, target.parts, batch, ones, settings, PhaseClock(target.device))
        sums += torch.stack(
            [losses.losses, losses.kl, losses.top1_accuracy, losses.overlap, batch.num_drafts]
        )  # f32[5, T]
    *totals, num_drafts = ranks.sum(sums).tolist()
    loss, kl, top1_accuracy, overlap = (shares(total, num_drafts) for total in totals)
    return HeldOutLosses(loss, kl, top1_accuracy, overlap, [int(number) for number in num_drafts])


def read_by_target(head: Head, target: Target, prompt: list[int], answer: list[int]) -> StoredDocument:
    """Returns a prompt and its answer with the target's states, as a stored document, but in the target's dtype."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    positions, last = torch.arange(ids.shape[1], device=target.device)[None], target.config.num_hidden_layers
    states = target.forward(ids, positions, target.cache(ids.shape[1]), (*head.capture_layers, last))
    streams = states.aux_hidden_states  # [1, S, L + 1, H]
    assert streams is not None
    loss_mask = torch.zeros(ids.shape[1], dtype=torch.uint8)
    loss_mask[len(prompt) :] = 1
    streams = streams[0].cpu()
    captured = streams[:, :-1].contiguous() if head.capture_layers else None
    return StoredDocument(0, ids[0].int().cpu(), loss_mask, streams[:, -1].contiguous(), captured)
