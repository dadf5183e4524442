"""Compares attention and loss with their definitions, and decoding with the training forward, on random tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mtptrain.heads import HEADS
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens, Packing, map_tensors
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import TargetStates, Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.training.batches import Batch
from mtptrain.training.losses import LossSettings, draft_losses
from mtptrain.utils.compile import eager

from ..bench.train_steps import case_of, dense_attention, random_batch, random_parts
from .findings import Finding, at_most

BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Maximum relative error by dtype. bf16 rounds with a relative error of up to 2^-8, and several roundings add up."""
DEPTHS = 3
LENGTHS = [129, 40, 300]
"""Number of tokens in each document."""


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found.float() - wanted.float()).norm() / wanted.float().norm()).detach())


def check_attention(device: torch.device, dtype: torch.dtype) -> Finding:
    """Compares attention at one depth and its gradients with a single softmax over a dense mask in fp32.

    Draft positions are the answers of chats, or single tokens.
    """
    answers = [(0, 5, 12), (0, 20, 30), (0, 60, 69), (1, 0, 40), (2, 100, 200)]
    points = [np.arange(3, length, 7) for length in LENGTHS]
    packings = Packing.of_spans(LENGTHS, answers), Packing.of_points(LENGTHS, points)
    errors = [error_of_attention(map_tensors(packing, lambda x: x.to(device)), device, dtype) for packing in packings]
    return at_most(max(errors), BOUNDS[dtype], "largest error of output and gradients")


def error_of_attention(packing: Packing, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, num_drafts = len(packing.positions), len(packing.draft_positions)
    shapes = [(num_drafts, 4, 64), *[(num_tokens, 2, 64)] * 2, *[(num_drafts, 2, 64)] * (2 * (DEPTHS - 1))]
    inputs = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, device=device)
    results = []
    for attention, work_dtype in ((depth_attention, dtype), (dense_depth_attention, torch.float32)):
        leaves = [x.to(work_dtype, copy=True).requires_grad_() for x in inputs]
        query, key, value, *own = leaves
        out = attention(query, key, value, own[: DEPTHS - 1], own[DEPTHS - 1 :], packing)
        results.append([out, *torch.autograd.grad((out.float() * weights).sum(), leaves)])
    return max(relative_error(*pair) for pair in zip(*results, strict=True))


def dense_depth_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
) -> torch.Tensor:
    """Computes `depth_attention` directly from its definition."""
    document = (packing.positions == 0).cumsum(0)  # [N]
    tokens = torch.arange(len(key), device=key.device)
    is_seen = (document[packing.draft_positions, None] == document) & (
        tokens <= packing.draft_positions[:, None]
    )  # [M, N]
    return dense_attention(
        query, [key[packing.key_indices], *own_keys], [value[packing.key_indices], *own_values], is_seen
    )


def random_case(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Head, FrozenParts, Batch]:
    """Returns a head for a small target, its frozen parts and a packed batch, all with random values."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_layers": 2, "sliding_window": 16} if name == "dflash" else {}
    case = case_of(hidden_size=256, vocab_size=512, head=HEADS[name].Config(ttt_steps=DEPTHS, **settings))
    head = build_head(case.head, case.target).to(device, dtype)
    batch = random_batch(case.target, (LENGTHS, [0] * len(LENGTHS)), head).to(device, dtype)
    return head, random_parts(case.target, device, dtype), batch


@torch.no_grad()
def check_decode(name: str, device: torch.device, dtype: torch.dtype) -> Finding:
    """Compares a head's states during decoding with a cache to those of its packed training forward."""
    head, parts, batch = random_case(name, device, dtype)
    reads = parts.final_norm(batch.hidden_states) if batch.aux_hidden_states is None else batch.aux_hidden_states
    tokens = PackedTokens(reads, batch.input_ids, batch.next_ids, batch.packing)
    trained = head(tokens, parts, DEPTHS)  # [T, M, H]
    found, wanted = [], []
    ids = torch.cat([batch.input_ids[:1], batch.next_ids])
    for start in (0, 20, 100):  # positions in the first document
        with eager():  # as in validation and acceptance
            found += drafted_states(head, parts, reads, ids, start, DEPTHS)
        wanted += trained[:, batch.packing.draft_positions == start][:, 0].unbind()
    return at_most(relative_error(torch.stack(found), torch.stack(wanted)), BOUNDS[dtype], "error of states")


def drafted_states(
    head: Head, parts: FrozenParts, target_states: torch.Tensor, ids: torch.Tensor, start: int, num_drafts: int
) -> list[torch.Tensor]:
    """Returns the head's state [H] at each depth of a draft from `start`, computed with a cache as in an engine.

    Each depth reads the document's own next token instead of the drafted one.

    Args:
        head: the head.
        parts: the target's frozen parts.
        target_states: the target's states that the head reads, [S, H] or [S, L, H]. Those after `start` are not used.
        ids: the document's tokens and the one after the last, i64[S + 1] or more.
        start: the position in the document from which the head drafts.
        num_drafts: K.
    """
    cache, positions = PositionCache(start + 2 + num_drafts), torch.arange(start + 1, device=ids.device)[None]
    read = target_states[None, : start + 1]
    states = TargetStates(read[..., 0, :], read) if head.read_layers else TargetStates(read, None)
    verified = Verified(ids[None], torch.full((1,), start + 2, device=ids.device), positions, states)
    first = head.draft_first(verified, parts, cache, num_drafts)
    found, fed_back = list(first.states[0]), first.fed_back[:, None]
    for depth in range(len(found), num_drafts):
        next_token, position = ids[start + 1 + depth].view(1, 1), positions[:, -1:] + depth
        state, fed_back = head.draft_next(fed_back, next_token, position, parts, cache)
        found.append(state[0, 0])
    return found


def check_loss(device: torch.device, dtype: torch.dtype) -> Finding:
    """Compares the blockwise KL loss and its gradient with a single fp32 computation over all logits."""
    _, parts, batch = random_case("mtp", device, dtype)
    is_draft = batch.is_draft
    states = torch.randn(*is_draft.shape, parts.embed_tokens.shape[1], device=device).to(dtype)
    scale = torch.ones(DEPTHS, device=device) / batch.num_drafts
    teacher_states = parts.final_norm(batch.hidden_states)[batch.packing.draft_positions + 1]
    ours = states.clone().requires_grad_()
    loss = draft_losses(
        ours, parts.lm_head, teacher_states, parts.logits, is_draft, scale, LossSettings(chunk_rows=96)
    ).loss
    plain = states.float().requires_grad_()
    wanted = plain_kl(plain, parts.to(device, torch.float32), teacher_states.float(), is_draft, scale)
    (grad,), (wanted_grad,) = torch.autograd.grad(loss, ours), torch.autograd.grad(wanted, plain)
    error = max(relative_error(loss.detach(), wanted.detach()), relative_error(grad, wanted_grad))
    return at_most(error, BOUNDS[dtype], "error of loss and gradient")


def plain_kl(
    states: torch.Tensor, parts: FrozenParts, teacher_states: torch.Tensor, is_draft: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Computes the forward KL by definition: depth k of draft position i has the teacher of depth 0 of i + k."""
    teacher = parts.logits(teacher_states).log_softmax(-1)  # [M, V]
    total = torch.zeros((), device=states.device)
    for depth, counts in enumerate(is_draft):
        wanted = torch.roll(teacher, -depth, 0)
        kl = (wanted.exp() * (wanted - parts.logits(states[depth]).log_softmax(-1))).sum(-1)
        total = total + scale[depth] * (kl * counts).sum()
    return total
