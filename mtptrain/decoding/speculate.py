"""THE draft -> verify -> accept path: training validates with it, `eval.acceptance` measures with it, and there is no other.

A sequence holds n tokens of which the target has read n - 1. A round drafts a chain of K tokens, or a tree of them with branches up to
K long; the target reads the last token and the drafts in one forward, and the longest branch that it agrees with is kept, with one
more token of its own (the bonus token). The head then runs depth 0 over the K+1 verified rows of that branch with the target's own
states, rejected rows included, which rebuilds its keys and gives the first draft of the next round.

Caches keep position p in slot p, so that each row of a batch goes on from its own length and rejected slots are written over; only a
tree takes slots of its own behind the sequence, until its accepted branch is moved to where it belongs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from mtptrain.target.model import Target, TargetStates
from mtptrain.target.position_cache import PositionCache, TreeRows
from mtptrain.utils.clock import PhaseClock


@dataclass(frozen=True)
class Verified:
    """Rows that the target has just read: the prompt, or the tokens of a round."""

    tokens: torch.Tensor
    """Every token so far, one row per sequence [B, slots]; valid below `num_tokens`."""
    num_tokens: torch.Tensor
    """Tokens of each sequence, the last one not yet read by the target [B]."""
    positions: torch.Tensor
    """Positions of the rows read [B, S]; those from `num_tokens` - 1 on were rejected, or pad the batch or the branch."""
    states: TargetStates
    """Of the rows [B, S, H], and what the drafter captures [B, S, L, H]."""

    @property
    def last_row(self) -> torch.Tensor:
        """Index [B] of the row whose next token is the newest."""
        return self.num_tokens - 2 - self.positions[:, 0]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes: a chain of K tokens, or a tree of D with branches up to K long; D = K for a chain."""

    tokens: torch.Tensor  # [B, D]
    is_proposed: torch.Tensor
    """bool[B, D]: False from where a sequence has nothing more to propose."""
    probs: torch.Tensor | None = None
    """The distributions that the tokens of a chain were sampled from [B, K, V]; None where they were chosen with certainty."""
    parents: torch.Tensor | None = None
    """Of a tree: which token each one follows, its index, lower than its own, or -1 for the newest token of the sequence [B, D]. A
    parent's children are different tokens."""
    logits: tuple[torch.Tensor, ...] | None = None
    """Of a head's chain, what each depth's token was chosen by, in the head's own vocabulary: [B, D] each."""

    def ancestors(self) -> torch.Tensor:
        """bool[B, 1 + D, 1 + D]: whether row i, the newest token or a draft, lies behind row j, or is it."""
        batch_size, num_drafts = self.tokens.shape
        device = self.tokens.device
        if self.parents is None:
            return torch.ones(num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=device).tril().expand(batch_size, -1, -1)
        above = torch.eye(num_drafts + 1, device=device).repeat(batch_size, 1, 1)
        above[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        while True:  # paths of up to 1, 2, 4, ... steps
            longer = (above @ above).clamp(max=1.0)
            if torch.equal(longer, above):
                return above.bool()
            above = longer


class Drafter(Protocol):
    """Proposes tokens for a batch of sequences; keeps what it needs between rounds."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Residual streams of the target that it reads."""

    @property
    def draft_slots(self) -> int:
        """Slots of a cache that a draft takes behind the sequence: K of a chain, D of a tree at least."""

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
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    generator: torch.Generator | None = field(default=None, repr=False)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the `top_k` likeliest tokens, and of these the first that hold `top_p` of their mass [..., V]."""
        probs = (logits.float() / self.temperature).softmax(-1)
        if self.top_k == 0 and self.top_p == 1.0:
            return probs
        ordered, order = probs.sort(-1, descending=True)
        ordered[..., self.top_k or ordered.shape[-1] :] = 0.0
        ordered = ordered / ordered.sum(-1, keepdim=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < self.top_p, ordered, 0.0)
        return torch.zeros_like(probs).scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row of logits [..., V], or a sampled one [...]."""
        return logits.argmax(-1) if self.is_greedy else self.sample(self.probs(logits).flatten(0, -2)).view(logits.shape[:-1])

    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        """One token [B] per row of weights [B, V], which need not sum to one."""
        return torch.multinomial(probs, 1, generator=self._generator(probs.device))[:, 0]

    def uniform_like(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1) in the shape of `like`."""
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device, dtype=like.dtype)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator


@dataclass(frozen=True)
class Accepted:
    """What verification keeps of a draft."""

    count: torch.Tensor
    """Tokens [B]."""
    bonus: torch.Tensor
    """The target's own token after them [B]."""
    branch: torch.Tensor
    """Rows of the verified ones [B, 1 + K] that are kept: 0 for the newest token, 1 + i for draft i; filled up behind `count` with any."""


def accept_chosen(draft: Draft, target_tokens: torch.Tensor, ancestors: torch.Tensor, num_depths: int) -> Accepted:
    """Keep the longest branch of drafts that are the target's own choice, greedy or sampled.

    A token that the target has sampled is accepted where the draft holds it, so that the output is the target's own whatever is
    drafted: for drafts chosen with certainty this is the rule of arXiv 2211.17192, and over all children at once that of SpecInfer
    (arXiv 2305.09781).

    Args:
        draft: D proposed tokens per sequence.
        target_tokens: the target's choice behind each row [B, 1 + D].
        ancestors: of `Draft.ancestors`.
        num_depths: K, the longest branch.
    """
    row_above = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) if draft.parents is None else draft.parents + 1
    chosen_there = target_tokens.gather(1, row_above.expand_as(draft.tokens))  # [B, D]
    is_wrong = F.pad((draft.tokens != chosen_there) | ~draft.is_proposed, (1, 0))  # [B, 1 + D]
    is_kept = ~(ancestors & is_wrong[:, None]).any(2)
    depths = ancestors.sum(2) - 1  # [B, 1 + D], of each row
    count = torch.where(is_kept, depths, 0).amax(1)
    at_depth = is_kept[:, None] & (
        depths[:, None] == torch.arange(num_depths + 1, device=depths.device)[:, None]
    )  # [B, 1 + K, 1 + D]
    branch = at_depth.int().argmax(2)
    return Accepted(count, target_tokens.gather(1, branch.gather(1, count[:, None]))[:, 0], branch)


def accept_sampled(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> Accepted:
    """Keep each sampled draft with probability min(1, target / draft) up to the first rejection, then sample from what is left.

    The result follows the target's distribution exactly: Fast Inference from Transformers via Speculative Decoding
    (arXiv 2211.17192), algorithm 1.

    Args:
        draft: K proposed tokens per sequence, a chain, and the distributions that they were sampled from.
        target_probs: at the newest token and at each draft [B, K+1, V].
        sampler: draws the uniform numbers and the bonus token.
    """
    chosen, draft_probs = draft.tokens[..., None], draft.probs  # [B, K, 1]
    assert draft_probs is not None and draft.parents is None
    ratio = target_probs[:, :-1].gather(2, chosen)[..., 0].double() / draft_probs.gather(2, chosen)[..., 0].double()
    is_kept = (sampler.uniform_like(ratio) < ratio) & draft.is_proposed
    num_accepted = is_kept.long().cumprod(1).sum(1)  # [B]
    residual = target_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, target_probs.shape[-1]))[:, 0]  # [B, V]
    # After the last proposed token nothing was rejected: a draft of no mass leaves the target's distribution as it is.
    rejected_probs = torch.cat([draft_probs * draft.is_proposed[..., None], torch.zeros_like(draft_probs[:, :1])], dim=1)
    rejected = rejected_probs.gather(1, num_accepted[:, None, None].expand(-1, 1, residual.shape[-1]))[:, 0]
    left = (residual - rejected).clamp(min=0.0)
    # Where draft and target are equal up to rounding, a rejection may leave nothing: then the target's own distribution serves.
    bonus = sampler.sample(torch.where(left.sum(-1, keepdim=True) > 0, left, residual))
    return Accepted(num_accepted, bonus, torch.arange(draft.tokens.shape[1] + 1, device=bonus.device).expand(len(bonus), -1))


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


@dataclass(frozen=True)
class Round:
    """What one round did, for those who look on."""

    draft: Draft
    accepted: Accepted
    target_logits: torch.Tensor
    """At the newest token and at each draft [B, 1+D, V]."""
    is_active: torch.Tensor
    """bool[B]: sequences that count."""


PHASES = ("prompt", "draft", "verify", "choose", "cache")
"""Of decoding: the target reads the prompts; drafts; their verification; acceptance and sampling; an accepted branch moves."""


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
    clock: PhaseClock | None = None,
    observe: Callable[[Round], None] | None = None,
) -> list[Generation]:
    """Decode a batch of prompts with drafts.

    A round counts in full even where the end of the sequence falls among its accepted tokens, as in vLLM's counters; a finished
    sequence counts no more.

    Args:
        target: the whole model.
        drafter: proposes a chain or a tree each round.
        prompts: token ids, at least one each.
        num_speculative_tokens: K, the longest branch of its drafts.
        max_new_tokens: of each sequence.
        sampler: temperature, and the source of random numbers.
        eos_token_ids: tokens that end a sequence.
        clock: is told what the time goes to, by the names of `PHASES`, and as `observe` what `observe` takes.
        observe: is shown every round.

    Raises:
        ValueError: a prompt is empty, or longer with its answer than the target's context.
    """
    check_prompts(prompts, max_new_tokens, target.config.max_position_embeddings)
    device, width = target.device, max(len(prompt) for prompt in prompts)
    rows, depths = torch.arange(len(prompts), device=device), torch.arange(num_speculative_tokens + 1, device=device)
    num_slots = width + max_new_tokens + 2 * (num_speculative_tokens + 1) + drafter.draft_slots
    num_tokens = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    limit = num_tokens + max_new_tokens
    tokens = torch.zeros(len(prompts), num_slots, dtype=torch.long, device=device)  # [B, slots]
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    counts = torch.zeros(len(prompts), 3 + num_speculative_tokens, dtype=torch.long, device=device)

    cache, clock = PositionCache(num_slots), clock or PhaseClock(device)
    drafter.start(len(prompts), num_slots)
    positions = torch.arange(width, device=device).expand(len(prompts), -1)  # [B, S]
    with clock.phase("prompt"):
        states = target.forward(tokens[:, :width], positions, cache, drafter.capture_layers)
        first = sampler.choose(target.parts.logits(states.hidden_states[rows, num_tokens - 1]))
    tokens[rows, num_tokens] = first
    num_tokens = num_tokens + 1
    is_active = (num_tokens < limit) & ~torch.isin(first, eos)

    while bool(is_active.any()):
        with clock.phase("draft"):
            draft = drafter.draft(Verified(tokens, num_tokens, positions, states), sampler)
        with clock.phase("verify"):
            root, ancestors = num_tokens - 1, draft.ancestors()
            positions = root[:, None] + depths  # of the newest token and of a branch [B, K+1]
            read = torch.cat([tokens.gather(1, root[:, None]), draft.tokens], dim=1)  # [B, 1+D]
            tree = None if draft.parents is None else TreeRows(root, 0, ancestors)
            states = target.forward(read, root[:, None] + ancestors.sum(2) - 1, cache, drafter.capture_layers, tree)
            target_logits = target.parts.logits(states.hidden_states)  # [B, 1+D, V]
        with clock.phase("choose"):
            if draft.probs is None or sampler.is_greedy:
                accepted = accept_chosen(draft, sampler.choose(target_logits), ancestors, num_speculative_tokens)
            else:
                accepted = accept_sampled(draft, sampler.probs(target_logits), sampler)
        if observe is not None:
            with clock.phase("observe"):
                observe(Round(draft, accepted, target_logits, is_active))
        if tree is not None:
            with clock.phase("cache"):
                cache.keep(root[:, None] + accepted.branch, positions)
                states = states.of_rows(accepted.branch)  # [B, K+1] rows
        tokens.scatter_(1, positions, read.gather(1, accepted.branch))
        tokens[rows, num_tokens + accepted.count] = accepted.bonus
        counts += _count(draft, accepted.count, num_speculative_tokens) * is_active[:, None]
        has_ended = (torch.isin(tokens.gather(1, positions + 1), eos) & (depths <= accepted.count[:, None])).any(1)
        # A finished row keeps its length and its answer: what is decoded behind it until the batch is done has no effect.
        num_tokens = torch.where(is_active, num_tokens + accepted.count + 1, num_tokens)
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


def _count(draft: Draft, num_accepted: torch.Tensor, num_depths: int) -> torch.Tensor:
    """A round's [rounds, empty rounds, drafted, accepted at 0 .. K-1] of each sequence [B, 3+K]."""
    num_drafted = draft.is_proposed.sum(1)  # [B]
    has_draft = (num_drafted > 0).long()
    accepted_at = torch.arange(num_depths, device=num_accepted.device) < num_accepted[:, None]  # [B, K]
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
