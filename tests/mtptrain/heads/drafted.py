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

    Each depth reads the document's own next token from `ids` instead of the drafted one. Those of the target's states
    [S, H] or [S, L, H] that come after `start` are not read.
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
