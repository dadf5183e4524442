"""Drafters for `speculate`: a head, which drafts a chain or a tree, prompt lookup, both combined, and none."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from mtptrain.decoding.draft import Draft
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads.base import Drafted, Head
from mtptrain.heads.corrected import Confident, Corrected
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache, TreeSlots


@dataclass(frozen=True)
class FirstDepth:
    """The outputs of a head's depth 0 at the last verified token, which is followed by the newest token."""

    logits: torch.Tensor
    """Logits of depth 0 [B, 1, D], or of all depths [B, K, D] if the head drafts them in one forward pass."""
    states: torch.Tensor
    """The states that give these logits [B, 1 or K, H]."""
    fed_back: torch.Tensor  # [B, H], the state that depth 1 reads
    newest: torch.Tensor  # i64[B], the newest token
    position: torch.Tensor  # [B], position of the last verified token


@dataclass(eq=False)
class HeadDrafter:
    """Drafts a chain of K tokens with a head."""

    head: Head
    parts: FrozenParts
    num_speculative_tokens: int
    sample_drafts: bool = False
    """Sample drafts if the sampler is not greedy, instead of taking the most likely tokens."""
    confidence_threshold: float = 0.0
    """A draft ends before the first token whose confidence is below this; 0 drafts K tokens always."""
    cache: PositionCache = field(default_factory=lambda: PositionCache(0), init=False)

    def start(self, batch_size: int, num_slots: int) -> None:
        self.cache = PositionCache(num_slots)

    @property
    def read_layers(self) -> tuple[int, ...]:
        return self.head.read_layers

    @property
    def draft_slots(self) -> int:
        return self.num_speculative_tokens

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        return self.later_depths(self.first_depth(verified), sampler)

    def first_depth(self, verified: Verified) -> FirstDepth:
        """Run depth 0 over the tokens that the target has just read, which rebuilds the head's keys of these tokens.

        Engines do the same, and training assumes it.
        """
        position = verified.num_tokens - 2  # [B]
        first = self.head.draft_first(verified, self.parts, self.cache, self.num_speculative_tokens)
        newest = verified.tokens.gather(1, position[:, None] + 1)[:, 0]
        logits = self.head.logits(first.states, self.parts)
        return FirstDepth(logits, first.states, first.fed_back, newest, position)

    def later_depths(self, first: FirstDepth, sampler: Sampler) -> Draft:
        """Run the depths that `first` lacks, each on the previous depth's token and state, and return the draft."""
        is_sampled = self.sample_drafts and not sampler.is_greedy
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        all_logits = []
        confidences: list[torch.Tensor] = []
        fed_back, positions = first.fed_back[:, None], first.position[:, None]  # [B, 1, H], [B, 1]
        for depth in range(self.num_speculative_tokens):
            if depth < first.logits.shape[1]:
                states, logits = first.states[:, depth], first.logits[:, depth]  # [B, H], [B, D]
            else:
                positions = positions + 1
                drafted = Drafted(fed_back, tokens[-1][:, None], positions)
                next_states, fed_back = self.head.draft_next(drafted, self.parts, self.cache)
                states = next_states[:, 0]
                logits = self.head.logits(states, self.parts)
            previous = tokens[-1] if tokens else first.newest
            if isinstance(self.head, Corrected):
                logits = self.head.corrected(logits, states, previous)
            all_logits.append(logits)
            if isinstance(self.head, Confident):
                confidences.append(self.head.confidence_of(states, previous))
            if is_sampled:
                draft_probs = sampler.draft_probs(logits)
                probs.append(self.head.over_target_vocab(draft_probs, len(self.parts.embed_tokens)))  # [B, V]
            draft_tokens = sampler.sample(draft_probs) if is_sampled else logits.argmax(-1)
            tokens.append(self.head.target_tokens(draft_tokens))
        all_tokens = torch.stack(tokens, 1)  # [B, K]
        confidence = torch.stack(confidences, 1) if confidences else None
        is_proposed = torch.ones_like(all_tokens, dtype=torch.bool)
        if self.confidence_threshold and confidence is not None:
            is_proposed = (confidence >= self.confidence_threshold).cumprod(1).bool()
        return Draft(
            all_tokens,
            is_proposed,
            torch.stack(probs, 1) if probs else None,
            logits=tuple(all_logits),
            confidences=confidence,
        )


class TreeDrafter(HeadDrafter):
    """Drafts a tree with a head.

    At each depth, each of the `top_k` likeliest branches is continued by its `top_k` likeliest tokens. The tree
    consists of the `num_nodes` likeliest of all these candidates. Source: EAGLE-2: Faster Inference of Language Models
    with Dynamic Draft Trees (arXiv 2406.16858).
    """

    def __init__(self, head: Head, parts: FrozenParts, num_speculative_tokens: int, num_nodes: int, top_k: int) -> None:
        super().__init__(head, parts, num_speculative_tokens)
        assert head.Config.drafts_trees, "the head drafts chains only"
        self.top_k = top_k
        self.num_nodes = min(num_nodes, top_k + (num_speculative_tokens - 1) * top_k**2)

    @property
    def draft_slots(self) -> int:
        """Slots that suffice for both the target's cache and the head's. The head's cache holds `top_k` tokens of
        each depth except the last."""
        return max(self.num_nodes, self.top_k * (self.num_speculative_tokens - 1))

    def later_depths(self, first: FirstDepth, sampler: Sampler) -> Draft:
        """Grow the tree depth by depth. W is `top_k`; C is the number of candidates at all depths."""
        batch_size, width = len(first.logits), self.top_k
        root = first.position + 1  # the first slot after the keys of verified tokens
        scores, tokens = self._likeliest(first.logits[:, 0], sampler)  # [B, W], log-probabilities of branches
        all_scores, all_tokens, all_parents = [scores], [tokens], [torch.full_like(tokens, -1)]
        parents = torch.arange(width, device=tokens.device).repeat(batch_size, 1)  # [B, W], candidates to continue
        fed_back = first.fed_back[:, None].expand(-1, width, -1)  # [B, W, H], the states to read with `tokens`
        sees = torch.zeros(batch_size, width, 0, dtype=torch.bool, device=tokens.device)  # [B, W, slots of the tree]
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).repeat(batch_size, 1, 1)
        for depth in range(1, self.num_speculative_tokens):
            # 1. Run the head on the branches to continue; each token sees its ancestors and itself.
            sees = torch.cat([sees, own], dim=2)
            positions = (first.position + depth)[:, None].expand(-1, width)
            tree = TreeSlots(root, (depth - 1) * width, sees)
            drafted = Drafted(fed_back, tokens, positions, tree)
            states, fed_back = self.head.draft_next(drafted, self.parts, self.cache)
            # 2. Their likeliest continuations become candidates.
            more_scores, more_tokens = self._likeliest(self.head.logits(states, self.parts), sampler)  # [B, W, W]
            more_scores = (scores[..., None] + more_scores).flatten(1)  # [B, W * W]
            num_before = sum(part.shape[1] for part in all_scores)
            all_scores.append(more_scores)
            all_tokens.append(more_tokens.flatten(1))
            all_parents.append(parents.repeat_interleave(width, dim=1))
            # 3. Continue with the likeliest of these candidates.
            scores, chosen = more_scores.topk(width)  # [B, W]
            branches = chosen // width
            parents, tokens = num_before + chosen, all_tokens[-1].gather(1, chosen)
            fed_back = fed_back.gather(1, branches[..., None].expand(-1, -1, fed_back.shape[-1]))
            sees = sees.gather(1, branches[..., None].expand(-1, -1, sees.shape[2]))
        return self._best(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1))

    def _likeliest(self, logits: torch.Tensor, sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities and target ids of the `top_k` likeliest tokens [..., W], from logits [..., D].

        Each log-probability is lowered by 1e-9, so that a child always ranks after its parent, even if the child has
        probability 1.
        """
        logprobs = logits.double() if sampler.is_greedy else sampler.scaled(logits.double())
        scores, tokens = logprobs.log_softmax(-1).topk(self.top_k)
        return scores - 1e-9, self.head.target_tokens(tokens)

    def _best(self, scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> Draft:
        """Returns the P = `num_nodes` likeliest of the candidates [B, C] as a tree.

        All ancestors of a chosen candidate are chosen too, because they rank before it.
        """
        chosen = scores.topk(self.num_nodes).indices.sort(1).values  # [B, P]
        index_in_tree = torch.full_like(tokens, -1).scatter_(
            1, chosen, torch.arange(self.num_nodes, device=tokens.device).expand_as(chosen)
        )
        chosen_parents = parents.gather(1, chosen)  # [B, P], indices of candidates
        tree_parents = torch.where(chosen_parents < 0, -1, index_in_tree.gather(1, chosen_parents.clamp(min=0)))
        return Draft(tokens.gather(1, chosen), torch.ones_like(chosen, dtype=torch.bool), parents=tree_parents)


class NoDrafter:
    """Proposes nothing: plain decoding."""

    read_layers: tuple[int, ...] = ()
    draft_slots = 0

    def start(self, batch_size: int, num_slots: int) -> None:
        pass

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        nothing = verified.tokens[:, :0]
        return Draft(nothing, nothing.bool())


@dataclass(eq=False)
class PromptLookupDrafter(NoDrafter):
    """Drafts the tokens that followed an earlier occurrence of the newest tokens: the baseline that needs no training.

    It finds the longest suffix of `min_ngram` to `max_ngram` tokens that also occurs earlier in the sequence, and
    drafts the tokens after its first occurrence, like vLLM's method `ngram`; with `latest`, those after the last one
    that at least K tokens follow, because recent text predicts the next tokens better.
    """

    draft_slots: int
    """K, the number of tokens of a draft."""
    max_ngram: int = 4
    min_ngram: int = 2
    latest: bool = False

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        sequences = zip(verified.tokens.tolist(), verified.num_tokens.tolist(), strict=True)
        proposals = [self._look_up(tokens[:count]) for tokens, count in sequences]
        tokens = [proposed + [0] * (self.draft_slots - len(proposed)) for proposed in proposals]
        num_proposed = torch.tensor([len(proposed) for proposed in proposals])
        is_proposed = torch.arange(self.draft_slots) < num_proposed[:, None]
        device = verified.tokens.device
        return Draft(torch.tensor(tokens, device=device), is_proposed.to(device))

    def _look_up(self, tokens: list[int]) -> list[int]:
        for size in range(self.max_ngram, self.min_ngram - 1, -1):
            suffix = tokens[-size:]
            starts = range(len(tokens) - size - self.draft_slots, -1, -1) if self.latest else range(len(tokens) - size)
            for start in starts:
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + self.draft_slots]
        return []


HYBRID_MIN_MATCH = 4
"""Number of newest tokens that must occur earlier in the text for prompt lookup to draft in a hybrid."""


class HybridDrafter:
    """Drafts by prompt lookup where the newest `min_match` tokens occur earlier, before K or more; else by the head."""

    def __init__(self, head: HeadDrafter, min_match: int = HYBRID_MIN_MATCH) -> None:
        self.head = head
        self.look_up = PromptLookupDrafter(
            head.num_speculative_tokens, max_ngram=min_match, min_ngram=min_match, latest=True
        )
        self.read_layers = head.read_layers
        self.draft_slots = head.draft_slots
        self.start = head.start

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        first, copied = self.head.first_depth(verified), self.look_up.draft(verified, sampler)
        is_copied = copied.is_proposed.all(1)  # [B]
        if is_copied.all():
            return copied
        drafted = self.head.later_depths(first, sampler)
        tokens = torch.where(is_copied[:, None], copied.tokens, drafted.tokens)
        if drafted.probs is None:
            return replace(drafted, tokens=tokens, logits=None, confidences=None)
        certain = F.one_hot(copied.tokens, drafted.probs.shape[-1]).to(drafted.probs.dtype)
        probs = torch.where(is_copied[:, None, None], certain, drafted.probs)
        return replace(drafted, tokens=tokens, logits=None, confidences=None, probs=probs)
