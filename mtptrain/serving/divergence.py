"""Where an engine first does something else than we do, and how near it was: a tiny gap of logits is rounding, a large one a fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Draft, Generation, Verified, speculate
from mtptrain.heads.base import Head
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache


@dataclass(frozen=True)
class Divergence:
    """The first token on which both sides differ."""

    what: str
    """`answer` where the target chose another token, `draft` where the head did."""
    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the token among the new ones."""
    ours: int
    theirs: int
    """Of a draft that the engine saw rejected and we accepted: the head's next choice, for the engine does not tell."""
    logit: float
    """Ours of our token."""
    logit_gap: float
    """Of our logits, ours - theirs."""

    def __str__(self) -> str:
        return (
            f"{self.what} token {self.position} of prompt {self.prompt} is {self.ours} here and {self.theirs} there, {self.logit_gap:.2g} "
            f"below ours of {self.logit:.3g} in our logits"
        )


def first_answer_divergence(
    target: Target, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> Divergence | None:
    """The first token of the first answer that differs; None where all are equal, or one only ends before the other."""
    for index, (prompt, our_tokens, their_tokens) in enumerate(zip(prompts, ours, theirs, strict=True)):
        pairs = zip(our_tokens, their_tokens, strict=False)
        position = next((position for position, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            tokens = torch.tensor([[*prompt, *our_tokens[:position]]], device=target.device)
            positions = torch.arange(tokens.shape[1], device=target.device)[None]
            states = target.forward(tokens, positions, PositionCache(tokens.shape[1])).hidden_states
            logits = target.parts.logits(states[0, -1])
            a, b = our_tokens[position], their_tokens[position]
            return Divergence("answer", index, position, a, b, float(logits[a]), float(logits[a] - logits[b]))
    return None


def first_draft_divergence(
    target: Target,
    head: Head,
    num_speculative_tokens: int,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Generation],
    theirs: Sequence[Sequence[int]],
) -> Divergence | None:
    """The first draft of the first prompt that one side accepted and the other did not, where their answers are equal.

    Args:
        num_speculative_tokens: K.
        ours: one per prompt.
        theirs: accepted drafts of each round, by prompt.
    """
    for index, (prompt, generation, their_rounds) in enumerate(zip(prompts, ours, theirs, strict=True)):
        at_depths = [sum(accepted > depth for accepted in their_rounds) for depth in range(num_speculative_tokens)]
        if (generation.rounds, generation.accepted_at) == (len(their_rounds), at_depths):
            continue
        recorder = _Recorder(head, target.parts, num_speculative_tokens)
        speculate(
            target,
            recorder,
            [prompt],
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=len(generation.tokens),
            sampler=Sampler(),
        )
        answer = torch.tensor([*prompt, *generation.tokens])
        for round_, their_accepted in zip_longest(recorder.rounds, their_rounds):
            if round_ is None or their_accepted is None:
                return None
            drafted = round_.tokens[: len(answer) - round_.num_tokens]
            kept = int((drafted == answer[round_.num_tokens :][: len(drafted)]).long().cumprod(0).sum())
            depth = min(kept, their_accepted)
            if kept != their_accepted and depth < len(drafted):
                chosen, token = int(drafted[depth]), int(answer[round_.num_tokens + depth])
                logits = round_.logits[depth]
                other = token if token != chosen else int(logits.topk(2).indices[1])
                position = round_.num_tokens + depth - len(prompt)
                return Divergence(
                    "draft", index, position, chosen, other, float(logits[chosen]), float(logits[chosen] - logits[other])
                )
    return None


@dataclass(frozen=True)
class _Round:
    num_tokens: int
    """Of prompt and answer when it began."""
    tokens: torch.Tensor  # [K]
    logits: torch.Tensor
    """Of the drafts over the target's vocabulary, -inf where the head has no such token [K, V]."""


class _Recorder:
    """A head's drafter that keeps every round of one prompt."""

    def __init__(self, head: Head, parts: FrozenParts, num_speculative_tokens: int) -> None:
        self.drafter = HeadDrafter(head, parts, num_speculative_tokens)
        self.rounds: list[_Round] = []

    @property
    def capture_layers(self) -> tuple[int, ...]:
        return self.drafter.capture_layers

    @property
    def draft_slots(self) -> int:
        return self.drafter.draft_slots

    def start(self, batch_size: int, num_slots: int) -> None:
        self.drafter.start(batch_size, num_slots)
        self.rounds = []

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        head, parts = self.drafter.head, self.drafter.parts
        logits: list[torch.Tensor] = []
        compute = head.logits

        def keep(states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
            logits.append(compute(states, parts))  # [1, D]
            return logits[-1]

        head.logits = keep  # type: ignore[method-assign]
        try:
            draft = self.drafter.draft(verified, sampler)
        finally:
            head.logits = compute  # type: ignore[method-assign]
        whole = torch.full((len(logits), len(parts.embed_tokens)), -torch.inf)
        ids = torch.arange(whole.shape[1]) if head.draft_token_ids is None else head.draft_token_ids.cpu()
        whole[:, ids] = torch.cat(logits).float().cpu()
        self.rounds.append(_Round(int(verified.num_tokens[0]), draft.tokens[0].cpu(), whole))
        return draft
