"""Where an engine first does something else than we do, and how near it was: a tiny gap of logits is rounding, a large one a fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, Round, speculate
from mtptrain.heads.base import Head
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
        rounds = _record_rounds(target, head, num_speculative_tokens, prompt, len(generation.tokens))
        answer = torch.tensor([*prompt, *generation.tokens])
        for round_, their_accepted in zip_longest(rounds, their_rounds):
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


def _record_rounds(
    target: Target, head: Head, num_speculative_tokens: int, prompt: Sequence[int], max_new_tokens: int
) -> list[_Round]:
    """Returns every round of one prompt, decoded greedily with the head."""
    vocab_size = len(target.parts.embed_tokens)
    ids = torch.arange(vocab_size) if head.draft_token_ids is None else head.draft_token_ids.cpu()
    rounds: list[_Round] = []
    num_tokens = len(prompt) + 1

    def record(seen: Round) -> None:
        nonlocal num_tokens
        assert seen.draft.logits is not None, "drafts of a head"
        logits = torch.full((num_speculative_tokens, vocab_size), -torch.inf)
        logits[:, ids] = torch.cat(seen.draft.logits).float().cpu()
        rounds.append(_Round(num_tokens, seen.draft.tokens[0].cpu(), logits))
        num_tokens += int(seen.accepted.count) + 1

    speculate(
        target,
        HeadDrafter(head, target.parts, num_speculative_tokens),
        [prompt],
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=max_new_tokens,
        sampler=Sampler(),
        observe=record,
    )
    return rounds
