"""Drafts along texts that another engine wrote, so that its counters can be compared with ours where rounding made it
choose other tokens."""

from collections.abc import Sequence

import torch

from mtptrain.target.model import Target, TargetStates
from mtptrain.target.position_cache import PositionCache, TreeSlots

UNKNOWN = -1


class FollowedTarget(Target):
    """A target that chooses the tokens of given texts, and past their ends its own."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Share the model of `target`, for one batch of prompts with an answer each."""
        vars(self).update(vars(target))
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        longest = max(map(len, texts))
        self._texts = torch.tensor([[*text, *[UNKNOWN] * (longest - len(text))] for text in texts], device=self.device)
        self._next = torch.tensor([len(prompt) for prompt in prompts], device=self.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        capture_layers: tuple[int, ...] = (),
        tree: TreeSlots | None = None,
    ) -> TargetStates:
        """Returns the target's states.

        After the prompts, `logits` must be called with the states that the last `forward` returned, because it looks up
        the texts at the positions of that `forward`.
        """
        if int(positions[0, 0]) > 0:
            self._next = positions + 1
        return super().forward(input_ids, positions, cache, capture_layers, tree)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits [..., V], infinite for the next token of a text, and its own past the end."""
        logits = super().logits(states)
        indices = self._next.reshape(len(self._texts), -1)
        known = self._texts.gather(1, indices.clamp(max=self._texts.shape[1] - 1))
        known = torch.where(indices < self._texts.shape[1], known, UNKNOWN).view(states.shape[:-1])
        is_known = (known != UNKNOWN)[..., None]
        token = known.clamp(min=0)[..., None]
        return logits.scatter(-1, token, torch.where(is_known, torch.inf, logits.gather(-1, token)))
