"""Finds the first token where an engine's output differs from ours.

A tiny logit gap points to rounding, a large one to a bug.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import History, Sampler
from mtptrain.decoding.speculate import Generation, Round, speculate
from mtptrain.heads.base import Head
from mtptrain.target.model import Target

GREEDY = Sampler()
ROUNDED_SHARE = 0.05
"""Largest gap between the logits of two tokens, as a share of the larger one, that rounding explains."""


@dataclass(frozen=True)
class Divergence:
    """The first token that differs between our output and the engine's."""

    what: str
    """`answer` if the target chose a different token, `draft` if the head did."""
    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the token among the new tokens."""
    ours: int
    theirs: int
    """The engine's token.

    Engines do not report rejected drafts; for a draft that only we accepted, this is the head's second choice.
    """
    logit: float
    """Our logit of our token."""
    logit_gap: float
    """Our logit of our token minus our logit of the engine's token."""

    @property
    def is_rounding(self) -> bool:
        """Whether rounding of weights or activations may explain the difference; for drafts, however large the gap."""
        return self.what == "draft" or abs(self.logit_gap) <= ROUNDED_SHARE * abs(self.logit)

    def __str__(self) -> str:
        """Returns the difference without its prompt, which callers name by an id or an index."""
        probably = "probably " if self.what == "draft" else ""
        return (
            f"{self.what} token {self.position} is {self.ours} for us and {probably}{self.theirs} for the engine; our "
            f"logit of the engine's token is {self.logit_gap:.2g} below that of our token, {self.logit:.3g}"
        )


def first_answer_divergence(
    target: Target,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    sampler: Sampler = GREEDY,
) -> Divergence | None:
    """Returns the first differing token of the first differing answer; None if answers differ at most in length.

    The logits are those that the sampler of both sides chose from, with its biases and penalties.
    """
    for index, (prompt, our_tokens, their_tokens) in enumerate(zip(prompts, ours, theirs, strict=True)):
        pairs = zip(our_tokens, their_tokens, strict=False)
        position = next((position for position, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            tokens = torch.tensor([[*prompt, *our_tokens[:position]]], device=target.device)
            positions = torch.arange(tokens.shape[1], device=target.device)[None]
            states = target.forward(tokens, positions, target.cache(tokens.shape[1])).postnorm_states
            prompt_length, length = torch.tensor([[len(prompt)], [tokens.shape[1]]], device=target.device)
            history = History.of(tokens, prompt_length, length)
            logits = sampler.processed(target.logits(states[:, -1:]), history)[0, 0]  # [V]
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
    sampler: Sampler = GREEDY,
) -> Divergence | None:
    """Returns the first draft that only one side accepted. All answers must be equal.

    `theirs` has the number of drafts that the engine accepted in each round of each prompt. Returns None if all counts
    are equal, if they differ only past the end of an answer, or if one side runs out of rounds before a difference.
    """
    for index, (prompt, generation, their_rounds) in enumerate(zip(prompts, ours, theirs, strict=True)):
        # 1. Skip prompts with equal counts.
        their_accepted_at = [
            sum(accepted > depth for accepted in their_rounds) for depth in range(num_speculative_tokens)
        ]
        if (generation.rounds, generation.accepted_at) == (len(their_rounds), their_accepted_at):
            continue
        # 2. Decode the prompt again and record our rounds.
        our_rounds: list[Round] = []
        speculate(
            target,
            HeadDrafter(head, target.parts, num_speculative_tokens),
            [prompt],
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=len(generation.tokens),
            sampler=sampler,
            observe=our_rounds.append,
        )
        # 3. Find the first round whose numbers of accepted drafts differ.
        new_tokens = torch.tensor(generation.tokens)
        position = 1  # index of the round's first draft; the target chose token 0
        for our_round, their_accepted in zip_longest(our_rounds, their_rounds):
            if our_round is None or their_accepted is None:
                return None
            drafted = our_round.draft.tokens[0].cpu()[: len(new_tokens) - position]
            our_accepted = int((drafted == new_tokens[position:][: len(drafted)]).long().cumprod(0).sum())
            depth = min(our_accepted, their_accepted)
            if our_accepted != their_accepted and depth < len(drafted):
                assert our_round.draft.logits is not None
                logits = _target_vocab_logits(our_round.draft.logits[depth][0], head, target)  # [V]
                chosen, token = int(drafted[depth]), int(new_tokens[position + depth])
                other = token if token != chosen else int(logits.topk(2).indices[1])
                gap = float(logits[chosen] - logits[other])
                return Divergence("draft", index, position + depth, chosen, other, float(logits[chosen]), gap)
            position += int(our_round.accepted.count[0]) + 1
    return None


def _target_vocab_logits(logits: torch.Tensor, head: Head, target: Target) -> torch.Tensor:
    """Returns a head's logits [D] over the target's vocabulary [V], -inf for tokens that the head cannot draft."""
    if head.draft_token_ids is None:
        return logits.float().cpu()
    all_logits = torch.full((len(target.parts.embed_tokens),), -torch.inf)
    all_logits[head.draft_token_ids.cpu()] = logits.float().cpu()
    return all_logits
