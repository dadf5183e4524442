"""Drafts with a cache, as an engine does, on a document whose tokens are known."""

import torch

from mtptrain.heads.base import Drafted, Head
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import TargetStates, Verified
from mtptrain.target.position_cache import PositionCache


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
        state, fed_back = head.draft_next(Drafted(fed_back, next_token, position), parts, cache)
        found.append(state[0, 0])
    return found
