"""The only draft -> verify -> accept loop: training validates with it and `mtptrain acceptance` measures with it.

The target has read all tokens of a sequence except the newest one. In each round,

1. the drafter proposes a chain of at most K tokens, or a tree whose branches have at most K tokens;
2. the target reads the newest token and all proposed ones in one forward;
3. the longest branch that the target agrees with is kept, followed by a token that the target chooses, the bonus token.

In the next round, a head that has a cache first runs depth 0 over the K + 1 tokens that were just verified, with the
target's own states. This rebuilds the head's keys and gives the first draft. Rejected tokens are computed too, but have
no effect.

Caches store position p in slot p. Each sequence of a batch therefore continues from its own length, and rejected slots
are overwritten. A tree is the exception: it occupies slots after the sequence until the accepted branch is copied to
the slots of its positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.sampler import History, Sampler
from mtptrain.target.model import Target, Verified
from mtptrain.target.position_cache import TreeSlots
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.compile import eager
from mtptrain.utils.errors import UserError


@dataclass(frozen=True)
class Accepted:
    """The part of a draft that verification keeps."""

    count: torch.Tensor
    """Number of accepted tokens [B]."""
    bonus: torch.Tensor
    """The target's own token after the accepted ones [B]."""
    branch: torch.Tensor
    """Indices of the accepted branch [B, 1 + K]: 0 for the newest token, 1 + p for draft p. Entries after index `count`
    are arbitrary."""


def accept(
    draft: Draft, target_logits: torch.Tensor, ancestors: torch.Tensor, num_depths: int, sampler: Sampler
) -> Accepted:
    """Accept drafts: sampled ones by rejection sampling, all others if they equal the target's own choices."""
    if draft.probs is None or sampler.is_greedy:
        return accept_chosen(draft, sampler.choose(target_logits), ancestors, num_depths)
    return accept_sampled(draft, sampler.probs(target_logits), sampler)


def accept_chosen(draft: Draft, target_tokens: torch.Tensor, ancestors: torch.Tensor, num_depths: int) -> Accepted:
    """Keep the longest branch of drafts that equal the target's own choices, greedy or sampled.

    The target's choices do not depend on the draft, so the output is what the target alone would generate. For a chain
    of greedy drafts, this is the rule of arXiv 2211.17192. For a tree, where all children of a token are checked at
    once, it is the greedy verification of SpecInfer (arXiv 2305.09781). `target_tokens` are the target's choices after
    each token that it has read [B, 1 + P], and K = `num_depths` is the length of the longest branch.
    """
    parent = (
        torch.arange(draft.tokens.shape[1], device=draft.tokens.device) if draft.parents is None else draft.parents + 1
    )
    chosen_there = target_tokens.gather(1, parent.expand_as(draft.tokens))  # [B, P]
    is_wrong = F.pad((draft.tokens != chosen_there) | ~draft.is_proposed, (1, 0))  # [B, 1 + P]
    is_kept = ~(ancestors & is_wrong[:, None]).any(2)
    depths = ancestors.sum(2) - 1  # [B, 1 + P], depth of each token
    count = torch.where(is_kept, depths, 0).amax(1)
    wanted_depths = torch.arange(num_depths + 1, device=depths.device)[:, None]
    at_depth = is_kept[:, None] & (depths[:, None] == wanted_depths)  # [B, 1 + K, 1 + P]
    branch = at_depth.int().argmax(2)
    return Accepted(count, target_tokens.gather(1, branch.gather(1, count[:, None]))[:, 0], branch)


def accept_sampled(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> Accepted:
    """Keep each draft with probability min(1, target / draft) until the first rejection, then sample from the residual.

    The result follows the target's distribution exactly: Fast Inference from Transformers via Speculative Decoding
    (arXiv 2211.17192), algorithm 1. The draft is a chain with the distributions that it was sampled from, and
    `target_probs` are the target's after the newest token and after each draft [B, K+1, V].
    """
    chosen, draft_probs = draft.tokens[..., None], draft.probs  # [B, K, 1]
    assert draft_probs is not None and draft.parents is None
    ratio = target_probs[:, :-1].gather(2, chosen)[..., 0].double() / draft_probs.gather(2, chosen)[..., 0].double()
    is_kept = (sampler.uniform_like(ratio) < ratio) & draft.is_proposed
    num_accepted = is_kept.long().cumprod(1).sum(1)  # [B]
    probs = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, target_probs.shape[-1]))[:, 0]  # [B, V]
    # If all proposed tokens were accepted, nothing is subtracted: the bonus token comes from the target's distribution.
    rejected_probs = torch.cat(
        [draft_probs * draft.is_proposed[..., None], torch.zeros_like(draft_probs[:, :1])], dim=1
    )
    rejected = rejected_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, probs.shape[-1]))[:, 0]
    residual = (probs - rejected).clamp(min=0.0)
    # If draft and target are equal up to rounding, a rejection may leave no mass; then sample from the target.
    bonus = sampler.sample(torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs))
    return Accepted(
        num_accepted, bonus, torch.arange(draft.tokens.shape[1] + 1, device=bonus.device).expand(len(bonus), -1)
    )


@dataclass(frozen=True)
class Generation:
    """The new tokens of one sequence, and its counts over rounds.

    The tokens are cut after an end-of-sequence token and at the limit. The round in which the sequence ends counts in
    full, as in vLLM's counters; later rounds do not count.
    """

    tokens: list[int]
    rounds: int
    """Number of rounds with at least one proposed token."""
    empty_rounds: int
    """Number of rounds without a proposed token."""
    drafted: int
    """Number of proposed tokens."""
    accepted_at: list[int]
    """Number of rounds that accepted the draft at each position [K]."""
    accepted_by_round: list[int] = field(default_factory=list)
    """Number of accepted drafts in each round. These drafts, the first token and a bonus token per round make up all
    tokens before the cut."""

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds, of a sequence with rounds."""
        return 1 + sum(self.accepted_at) / self.rounds


@dataclass(frozen=True)
class Round:
    """The draft of a round and its outcome, for observers."""

    draft: Draft
    accepted: Accepted
    target_logits: torch.Tensor
    """The target's logits after the newest token and after each draft [B, 1+P, V], with the sampler's biases and
    penalties."""
    is_active: torch.Tensor
    """bool[B]: the sequences that are not finished."""

    def num_tokens(self) -> int:
        """Returns the number of new tokens. Waits for a GPU."""
        return int((self.accepted.count + 1)[self.is_active].sum())

    def outcomes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns, for each draft of a chain, whether it counts and whether it was accepted, each bool[B, K].

        A draft counts if all drafts before it were accepted and its sequence is not finished.
        """
        depths = torch.arange(self.draft.tokens.shape[1], device=self.draft.tokens.device)
        count = self.accepted.count[:, None]
        return (depths <= count) & self.is_active[:, None], depths < count


PHASES = ("prompt", "draft", "verify", "choose", "cache")
"""Phases of decoding: reading the prompts; drafting; reading the drafts; accepting and sampling; moving the accepted
branch of a tree in the cache."""


@torch.no_grad()
@eager()  # every round has different shapes, and each would trigger a compilation
def speculate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    sampler: Sampler,
    eos_token_ids: Sequence[int] = (),
    clock: PhaseClock | None = None,
    observe: Callable[[Round], None] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts with drafts, whose longest branch has K = `num_speculative_tokens` tokens.

    `observe` is called with every round. The clock adds up the seconds of each phase in `PHASES`, and of these calls.
    """
    # 1. Allocate the sequences and a cache, with room for a round that goes past the last token.
    check_prompts(prompts, max_new_tokens, target.config.max_position_embeddings)
    batch = _Batch(prompts, max_new_tokens, num_speculative_tokens, drafter.draft_slots, eos_token_ids, target.device)
    cache = target.cache(batch.num_slots, [len(prompt) for prompt in prompts])
    clock = clock or PhaseClock(target.device)
    drafter.start(len(prompts), batch.num_slots)
    # 2. The target reads the prompts and chooses the first new token of each.
    with clock.phase("prompt"):
        positions = batch.prompt_positions()  # [B, S]
        states = target.forward(batch.tokens[:, : positions.shape[1]], positions, cache, drafter.read_layers)
        first_logits = target.logits(states.postnorm_states[batch.sequences, batch.num_tokens - 1])  # [B, V]
        first = sampler.choose(batch.processed(first_logits[:, None], sampler)[:, 0])
    batch.append_first(first)
    while bool(batch.is_active.any()):
        # 3. Draft after the newest token.
        with clock.phase("draft"):
            draft = drafter.draft(Verified(batch.tokens, batch.num_tokens, positions, states), sampler)
        # 4. The target reads the newest token and all drafts in one forward.
        with clock.phase("verify"):
            root, ancestors = batch.num_tokens - 1, draft.ancestors()
            read = torch.cat([batch.tokens.gather(1, root[:, None]), draft.tokens], dim=1)  # [B, 1+P]
            tree = None if draft.parents is None else TreeSlots(root, 0, ancestors)
            states = target.forward(read, root[:, None] + ancestors.sum(2) - 1, cache, drafter.read_layers, tree)
            target_logits = target.logits(states.postnorm_states)  # [B, 1+P, V]
        # 5. Accept the longest branch that the target agrees with, and take the bonus token.
        with clock.phase("choose"):
            target_logits = batch.processed(target_logits, sampler, draft)
            accepted = accept(draft, target_logits, ancestors, num_speculative_tokens, sampler)
        if observe is not None:
            with clock.phase("observe"):
                observe(Round(draft, accepted, target_logits, batch.is_active))
        # 6. Move the accepted branch of a tree to the slots of its positions, then append its tokens.
        positions = root[:, None] + batch.depths  # [B, K+1]
        if tree is not None:
            with clock.phase("cache"):
                cache.keep(root[:, None] + accepted.branch, positions)
                states = states.at_indices(accepted.branch)  # [B, K+1, ...]
        batch.append(read, positions, draft, accepted)
    return batch.generations()


class _Batch:
    """The sequences of a batch while they are decoded, and their counts."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_depths: int,
        draft_slots: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self.prompts, self.max_new_tokens, self.eos_token_ids = prompts, max_new_tokens, eos_token_ids
        self.num_slots = max(map(len, prompts)) + max_new_tokens + 2 * (num_depths + 1) + draft_slots
        self.sequences = torch.arange(len(prompts), device=device)
        self.depths = torch.arange(num_depths + 1, device=device)
        self.num_tokens = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
        self.prompt_lengths = self.num_tokens
        self.limit = self.num_tokens + max_new_tokens
        self.tokens = torch.zeros(len(prompts), self.num_slots, dtype=torch.long, device=device)  # [B, slots]
        for index, prompt in enumerate(prompts):
            self.tokens[index, : len(prompt)] = torch.tensor(prompt, device=device)
        self.is_active = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._accepted: list[torch.Tensor] = []  # number accepted per round [B]; -1 for finished sequences
        self._counts = torch.zeros(len(prompts), 3 + num_depths, dtype=torch.long, device=device)

    def prompt_positions(self) -> torch.Tensor:
        """Returns positions 0 .. S - 1 for each sequence [B, S], where S is the length of the longest prompt."""
        longest = max(map(len, self.prompts))
        return torch.arange(longest, device=self.tokens.device).expand(len(self.prompts), -1)

    def processed(self, logits: torch.Tensor, sampler: Sampler, draft: Draft | None = None) -> torch.Tensor:
        """Returns the target's logits after the newest token and each draft [B, 1+P, V] as the sampler processes them.

        The text before a choice is all tokens so far, the draft before it, and that draft's ancestors.
        """
        if not sampler.changes_logits:
            return logits
        history = History.of(self.tokens, self.prompt_lengths, self.num_tokens)
        if draft is not None:
            history = history.with_drafts(draft.tokens, draft.ancestors())
        return sampler.processed(logits, history)

    def append_first(self, first: torch.Tensor) -> None:
        """Append the token [B] that follows each prompt."""
        self.tokens[self.sequences, self.num_tokens] = first
        self.num_tokens = self.num_tokens + 1
        self.is_active = (self.num_tokens < self.limit) & ~torch.isin(first, self._eos)

    def append(self, read: torch.Tensor, positions: torch.Tensor, draft: Draft, accepted: Accepted) -> None:
        """Append the accepted tokens of a round and its bonus token, and count the round.

        The target has `read` the newest token and the drafts [B, 1+P]. The positions [B, K+1] are those of the newest
        token and of the K tokens after it.
        """
        num_depths = len(self.depths) - 1
        self.tokens.scatter_(1, positions, read.gather(1, accepted.branch))
        self.tokens[self.sequences, self.num_tokens + accepted.count] = accepted.bonus
        self._counts += _round_counts(draft, accepted.count, num_depths) * self.is_active[:, None]
        self._accepted.append(accepted.count.masked_fill(~self.is_active, -1))
        is_end = torch.isin(self.tokens.gather(1, positions + 1), self._eos)
        has_ended = (is_end & (self.depths <= accepted.count[:, None])).any(1)
        # A finished sequence keeps its length, so tokens that are still decoded after it have no effect.
        self.num_tokens = torch.where(self.is_active, self.num_tokens + accepted.count + 1, self.num_tokens)
        self.is_active = self.is_active & (self.num_tokens < self.limit) & ~has_ended

    def generations(self) -> list[Generation]:
        generations = []
        accepted = torch.stack([*self._accepted, torch.full_like(self.num_tokens, -1)], 1).tolist()
        for tokens, prompt, end, (rounds, empty_rounds, drafted, *accepted_at), of_rounds in zip(
            self.tokens.tolist(), self.prompts, self.num_tokens.tolist(), self._counts.tolist(), accepted, strict=True
        ):
            new_tokens = tokens[len(prompt) : end][: self.max_new_tokens]
            ends = [i for i, token in enumerate(new_tokens) if token in self.eos_token_ids]
            new_tokens = new_tokens[: ends[0] + 1] if ends else new_tokens
            kept = [count for count in of_rounds if count >= 0]
            generations.append(Generation(new_tokens, rounds, empty_rounds, drafted, accepted_at, kept))
        return generations


def _round_counts(draft: Draft, num_accepted: torch.Tensor, num_depths: int) -> torch.Tensor:
    """Returns (rounds, empty rounds, drafted, accepted at 0 .. K-1) of a single round for each sequence [B, 3+K]."""
    num_drafted = draft.is_proposed.sum(1)  # [B]
    has_draft = (num_drafted > 0).long()
    accepted_at = torch.arange(num_depths, device=num_accepted.device) < num_accepted[:, None]  # [B, K]
    return torch.cat([torch.stack([has_draft, 1 - has_draft, num_drafted], 1), accepted_at.long()], 1)


def tokens_to_fit(context_tokens: int, spare_tokens: int) -> str:
    """Returns the size of a context for an error message, such as "512 tokens with 10 to spare"."""
    return f"{context_tokens} tokens" + (f" with {spare_tokens} to spare" if spare_tokens else "")


def check_prompts(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    context_tokens: int,
    names: Sequence[str] = (),
    spare_tokens: int = 0,
) -> None:
    """Raises UserError if a prompt is empty, or if prompt, answer and `spare_tokens` exceed the target's context.

    The message begins with the prompt's name if `names` are given, or else with its index.
    """
    for index, prompt in enumerate(prompts):
        name = names[index] if names else f"prompt {index}"
        if not len(prompt):
            raise UserError(f"{name}: must hold at least one token, but is empty; leave it out")
        if len(prompt) + max_new_tokens > context_tokens - spare_tokens:
            raise UserError(
                f"{name}: prompt and answer, or drafts, must fit the target's context of "
                f"{tokens_to_fit(context_tokens, spare_tokens)}, but are {len(prompt)} + {max_new_tokens}; shorten the "
                "prompt or lower acceptance.max_new_tokens and acceptance.num_speculative_tokens"
            )
