"""THE draft -> verify -> accept path: training validates with it, `eval.acceptance` measures with it, and there is no other.

A sequence holds n tokens of which the target has read n - 1. A round drafts K tokens, the target reads the last token and the
drafts in one forward, and the longest prefix of drafts that it agrees with is kept, with one more token of its own (the bonus
token). The head then runs depth 0 over all K+1 verified rows with the target's own states, rejected rows included, which rebuilds
its keys and gives the first draft of the next round.

Caches keep position p in slot p, so that each row of a batch goes on from its own length and rejected slots are written over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mtptrain.target import PositionCache, Target, TargetStates


@dataclass(frozen=True)
class Verified:
    """Rows that the target has just read: the prompt, or the tokens of a round."""

    tokens: torch.Tensor
    """Every token so far, one row per sequence [B, slots]; valid below `num_tokens`."""
    num_tokens: torch.Tensor
    """Tokens of each sequence, the last one not yet read by the target [B]."""
    positions: torch.Tensor
    """Positions of the rows read [B, S]; those from `num_tokens` - 1 on were rejected, or pad the batch."""
    states: TargetStates
    """Of the rows [B, S, H], and what the drafter captures [B, S, L, H]."""

    @property
    def last_row(self) -> torch.Tensor:
        """Index [B] of the row whose next token is the newest."""
        return self.num_tokens - 2 - self.positions[:, 0]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes."""

    tokens: torch.Tensor  # [B, K]
    is_proposed: torch.Tensor
    """bool[B, K]: False from where a sequence has nothing more to propose."""
    probs: torch.Tensor | None = None
    """The distributions that the tokens were sampled from [B, K, V]; None where they were chosen with certainty."""


class Drafter(Protocol):
    """Proposes tokens for a batch of sequences; keeps what it needs between rounds."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Residual streams of the target that it reads."""

    def start(self, batch_size: int, num_slots: int) -> None:
        """Forget the sequences before."""

    def draft(self, verified: Verified, sampler: "Sampler") -> Draft:
        """K tokens for each sequence, going on from the newest.

        Args:
            verified: what the target has just read.
            sampler: the one that verifies too: drafts must not come from a copy of its random numbers.
        """


@dataclass
class Sampler:
    """Greedy at temperature 0, else multinomial by a generator of its own."""

    temperature: float = 0.0
    seed: int = 0
    generator: torch.Generator | None = field(default=None, repr=False)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() / self.temperature).softmax(-1)  # [..., V]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row of logits [B, V], or a sampled one [B]."""
        return logits.argmax(-1) if self.is_greedy else self.sample(self.probs(logits))

    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        """One token [B] per row of weights [B, V], which need not sum to one."""
        return torch.multinomial(probs, 1, generator=self._generator(probs.device))[:, 0]

    def coins(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1) in the shape of `like`."""
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device, dtype=like.dtype)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator


def accept_greedy(draft: Draft, target_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the drafts up to the first that is not the target's most likely token.

    Args:
        draft: K proposed tokens per sequence.
        target_logits: at the newest token and at each draft [B, K+1, V].

    Returns:
        Number of drafts kept [B] and the target's own token after them [B].
    """
    target_tokens = target_logits.argmax(-1)  # [B, K+1]
    is_kept = (draft.tokens == target_tokens[:, :-1]) & draft.is_proposed
    num_accepted = is_kept.long().cumprod(1).sum(1)
    return num_accepted, target_tokens.gather(1, num_accepted[:, None])[:, 0]


def accept_sampled(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each draft with probability min(1, target / draft) up to the first rejection, then sample from what is left of the target.

    The result follows the target's distribution exactly: Fast Inference from Transformers via Speculative Decoding
    (arXiv 2211.17192), algorithm 1.

    Args:
        draft: K proposed tokens per sequence and the distributions that they were sampled from.
        target_probs: at the newest token and at each draft [B, K+1, V].
        sampler: for the coins and the bonus token.

    Returns:
        Number of drafts kept [B] and the token after them [B].
    """
    chosen = draft.tokens[..., None]  # [B, K, 1]
    draft_probs = draft.probs
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter_(2, chosen, 1.0)
    ratio = target_probs[:, :-1].gather(2, chosen)[..., 0].double() / draft_probs.gather(2, chosen)[..., 0].double()
    is_kept = (sampler.coins(ratio) < ratio) & draft.is_proposed
    num_accepted = is_kept.long().cumprod(1).sum(1)  # [B]
    residual = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, target_probs.shape[-1]))[:, 0]  # [B, V]
    # After the last proposed token nothing was rejected: a draft of no mass leaves the target's distribution as it is.
    rejected_probs = torch.cat([draft_probs * draft.is_proposed[..., None], torch.zeros_like(draft_probs[:, :1])], dim=1)
    rejected = rejected_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, residual.shape[-1]))[:, 0]
    left = (residual - rejected).clamp(min=0.0)
    # Where draft and target are equal up to rounding, a rejection may leave nothing: then the target's own distribution serves.
    return num_accepted, sampler.sample(torch.where(left.sum(-1, keepdim=True) > 0, left, residual))


@dataclass(frozen=True)
class Generation:
    """One sequence's new tokens, cut behind an end-of-sequence token and at the limit, and its counts over rounds."""

    tokens: list[int]
    rounds: int
    """Rounds with at least one proposed token."""
    empty_rounds: int
    """Rounds in which the drafter had nothing to propose."""
    drafted: int
    accepted_at: list[int]
    """Rounds that accepted the draft at each position [K]."""


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    sampler: Sampler,
    eos_token_ids: Sequence[int] = (),
) -> list[Generation]:
    """Decode a batch of prompts with drafts.

    A round counts in full even where the end of the sequence falls among its accepted tokens, as in vLLM's counters; a finished
    sequence counts no more.

    Args:
        target: the whole model.
        drafter: proposes `num_speculative_tokens` (K) tokens a round.
        prompts: token ids, at least one each.
        num_speculative_tokens: K.
        max_new_tokens: of each sequence.
        sampler: temperature and coins.
        eos_token_ids: tokens that end a sequence.

    Raises:
        ValueError: a prompt is empty, or longer with its answer than the target's context.
    """
    check_prompts(prompts, max_new_tokens, target.config.max_position_embeddings)
    device, width = target.device, max(len(prompt) for prompt in prompts)
    rows, depths = torch.arange(len(prompts), device=device), torch.arange(num_speculative_tokens + 1, device=device)
    num_slots = width + max_new_tokens + 2 * (num_speculative_tokens + 1)
    num_tokens = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    limit = num_tokens + max_new_tokens
    tokens = torch.zeros(len(prompts), num_slots, dtype=torch.long, device=device)  # [B, slots]
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    counts = torch.zeros(len(prompts), 3 + num_speculative_tokens, dtype=torch.long, device=device)

    cache = PositionCache(num_slots)
    drafter.start(len(prompts), num_slots)
    positions = torch.arange(width, device=device).expand(len(prompts), -1)  # [B, S]
    states = target.forward(tokens[:, :width], positions, cache, drafter.capture_layers)
    first = sampler.choose(target.parts.logits(states.hidden_states[rows, num_tokens - 1]))
    tokens[rows, num_tokens] = first
    num_tokens = num_tokens + 1
    is_active = (num_tokens < limit) & ~torch.isin(first, eos)

    while bool(is_active.any()):
        draft = drafter.draft(Verified(tokens, num_tokens, positions, states), sampler)
        positions = (num_tokens - 1)[:, None] + depths  # the newest token and the drafts [B, K+1]
        tokens.scatter_(1, positions[:, 1:], draft.tokens)
        states = target.forward(tokens.gather(1, positions), positions, cache, drafter.capture_layers)  # of [B, K+1] rows
        target_logits = target.parts.logits(states.hidden_states)  # [B, K+1, V]
        if sampler.is_greedy:
            num_accepted, bonus = accept_greedy(draft, target_logits)
        else:
            num_accepted, bonus = accept_sampled(draft, sampler.probs(target_logits), sampler)
        tokens[rows, num_tokens + num_accepted] = bonus
        counts += _count(draft, num_accepted) * is_active[:, None]
        has_ended = (torch.isin(tokens.gather(1, positions + 1), eos) & (depths <= num_accepted[:, None])).any(1)
        # A finished row keeps its length and its answer: what is decoded behind it until the batch is done has no effect.
        num_tokens = torch.where(is_active, num_tokens + num_accepted + 1, num_tokens)
        is_active = is_active & (num_tokens < limit) & ~has_ended
    return _generations(tokens, num_tokens, prompts, max_new_tokens, eos_token_ids, counts)


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, context_tokens: int) -> None:
    """Raises ValueError where a prompt is empty, or longer with its answer than the target's context."""
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index}: must hold at least one token, but is empty; leave it out")
        if len(prompt) + max_new_tokens > context_tokens:
            raise ValueError(
                f"prompt {index}: prompt and answer must fit the target's context of {context_tokens} tokens, but are {len(prompt)} + "
                f"{max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )


def _count(draft: Draft, num_accepted: torch.Tensor) -> torch.Tensor:
    """A round's [rounds, empty rounds, drafted, accepted at 0 .. K-1] of each sequence [B, 3+K]."""
    num_drafted = draft.is_proposed.sum(1)  # [B]
    has_draft = (num_drafted > 0).long()
    accepted_at = torch.arange(draft.tokens.shape[1], device=num_accepted.device) < num_accepted[:, None]  # [B, K]
    return torch.cat([torch.stack([has_draft, 1 - has_draft, num_drafted], 1), accepted_at.long()], 1)


def _generations(
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    counts: torch.Tensor,
) -> list[Generation]:
    generations = []
    for row, prompt, end, (rounds, empty_rounds, drafted, *accepted_at) in zip(
        tokens.tolist(), prompts, num_tokens.tolist(), counts.tolist(), strict=True
    ):
        new_tokens = row[len(prompt) : end][:max_new_tokens]
        ends = [i for i, token in enumerate(new_tokens) if token in eos_token_ids]
        generations.append(
            Generation(new_tokens[: ends[0] + 1] if ends else new_tokens, rounds, empty_rounds, drafted, accepted_at)
        )
    return generations
