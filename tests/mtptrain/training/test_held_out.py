"""Held-out losses equal those of drafting token by token, with the target's own tokens at every depth."""

import pytest
import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.speculate import Generation
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from mtptrain.training.held_out import HeldOutLosses, held_out_losses
from mtptrain.training.losses import LossSettings
from mtptrain.utils.distributed import Ranks
from tests.mtptrain.decoding.drafting import decode
from tests.mtptrain.heads.drafted import drafted_states
from tests.mtptrain.heads.test_contract import draw_norms

DEPTHS = 3
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6] * 12]


def measured(target: Target, head: Head, generations: list[Generation]) -> HeldOutLosses:
    answered = zip(PROMPTS, generations, strict=True)
    losses = held_out_losses(head, target, answered, DEPTHS, LossSettings(chunk_rows=7), Ranks(0, 1, 0))
    assert losses is not None
    return losses


@torch.no_grad()
def drafted_token_by_token(target: Target, head: Head, generations: list[Generation]) -> list[tuple[float, float, int]]:
    """Returns the mean KL, the mean top-1 accuracy and the number of drafts at each depth.

    The first token of an answer is never drafted, so it does not count.
    """
    sums = torch.zeros(DEPTHS, 3)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        ids = torch.tensor(prompt + generation.tokens)
        positions, cache = torch.arange(len(ids))[None], PositionCache(len(ids))
        states = target.forward(ids[None], positions, cache, head.read_layers)
        read = states.read_by(head.read_layers)[0]
        teacher = target.parts.logits(states.postnorm_states[0]).log_softmax(-1)
        for start in range(len(prompt) - 1, len(ids) - 2):
            drafts = drafted_states(head, target.parts, read, torch.cat([ids, ids[:DEPTHS]]), start, DEPTHS)
            for depth, state in enumerate(drafts[: len(ids) - 2 - start]):
                logprobs, logp = head.logits(state, target.parts).log_softmax(-1), teacher[start + 1 + depth]
                kl = (logp.exp() * (logp - logprobs)).sum()
                sums[depth] += torch.tensor([kl, logprobs.argmax() == logp.argmax(), 1.0])
    return [(kl / count, hits / count, int(count)) for kl, hits, count in sums.tolist()]


@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash"])
def test_held_out_losses_are_those_of_drafting_token_by_token(target: Target, name: str) -> None:
    torch.manual_seed(2)
    settings = {} if name == "mtp" else {"capture_layers": [0, 1]}
    head = build_head(HEADS[name].Config(ttt_steps=DEPTHS, **settings), target.config).eval().requires_grad_(False)
    draw_norms(head)
    generations = decode(target, HeadDrafter(head, target.parts, DEPTHS), PROMPTS, max_new_tokens=11)
    losses, drafted = measured(target, head, generations), drafted_token_by_token(target, head, generations)
    assert losses.num_drafts_at == [count for *_, count in drafted] == [30, 27, 24]
    assert losses.kl_at == losses.loss_at == pytest.approx([kl for kl, *_ in drafted], rel=1e-4)
    assert losses.top1_accuracy_at == pytest.approx([accuracy for _, accuracy, _ in drafted], abs=1e-6)
    short = [Generation(each.tokens[:1], 0, 0, 0, [0] * DEPTHS) for each in generations]
    assert measured(target, head, short).num_drafts_at == [0, 0, 0], "an answer of one token has no draft"
