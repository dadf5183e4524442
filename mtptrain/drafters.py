"""What proposes tokens to `speculate`: a head, or the text so far."""

import torch

from mtptrain.heads.base import Head
from mtptrain.speculate import Draft, Sampler, Verified
from mtptrain.target import FrozenParts, PositionCache


class HeadDrafter:
    """Drafts a chain of K tokens with a head."""

    def __init__(self, head: Head, parts: FrozenParts, num_speculative_tokens: int, sample_drafts: bool = False) -> None:
        self.head = head
        self.parts = parts
        self.num_speculative_tokens = num_speculative_tokens
        self.sample_drafts = sample_drafts
        """Where the sampler is not greedy: sample drafts too, in place of the most likely tokens."""
        self.cache = PositionCache(0)

    def start(self, batch_size: int, num_slots: int) -> None:
        self.cache = PositionCache(num_slots)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        return self.head.capture_layers

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        next_tokens = verified.tokens.gather(1, verified.positions + 1)  # [B, S]
        aux_hidden_states = verified.states.aux_hidden_states
        fused = self.head.fuse(verified.states.hidden_states if aux_hidden_states is None else aux_hidden_states)  # [B, S, H]
        states, recycled = self._step(fused, next_tokens, verified.positions)  # [B, S, H]
        rows = torch.arange(len(states), device=states.device)
        state, recycled = states[rows, verified.last_row], recycled[rows, verified.last_row]  # [B, H]
        position = verified.num_tokens - 2  # [B]
        is_sampled = self.sample_drafts and not sampler.is_greedy
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for depth in range(self.num_speculative_tokens):
            if depth > 0:
                position = position + 1
                states, fed_back = self._step(recycled[:, None], tokens[-1][:, None], position[:, None])
                state, recycled = states[:, 0], fed_back[:, 0]
            logits = self.head.logits(state, self.parts)  # [B, D]
            if is_sampled:
                draft_probs = sampler.probs(logits)
                probs.append(self.head.target_probs(draft_probs, len(self.parts.embed_tokens)))  # [B, V]
            draft_tokens = sampler.sample(draft_probs) if is_sampled else logits.argmax(-1)
            tokens.append(self.head.target_tokens(draft_tokens))
        drafted = torch.stack(tokens, 1)  # [B, K]
        return Draft(drafted, torch.ones_like(drafted, dtype=torch.bool), torch.stack(probs, 1) if probs else None)

    def _step(
        self, hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.decode(hidden_states, self.parts.embed(tokens), positions, self.cache)


class PromptLookupDrafter:
    """Drafts what followed the last earlier occurrence of the newest tokens: the baseline that needs no training.

    The longest suffix of `max_ngram` .. `min_ngram` tokens that occurs before wins, and its latest occurrence.
    """

    capture_layers: tuple[int, ...] = ()

    def __init__(self, num_speculative_tokens: int, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def start(self, batch_size: int, num_slots: int) -> None:
        pass

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        rows = [tokens[:count] for tokens, count in zip(verified.tokens.tolist(), verified.num_tokens.tolist(), strict=True)]
        found = [self._look_up(row) for row in rows]
        missing = [self.num_speculative_tokens - len(tokens) for tokens in found]
        tokens = [proposed + [0] * pad for proposed, pad in zip(found, missing, strict=True)]
        is_proposed = [[True] * len(proposed) + [False] * pad for proposed, pad in zip(found, missing, strict=True)]
        device = verified.tokens.device
        return Draft(torch.tensor(tokens, device=device), torch.tensor(is_proposed, device=device))

    def _look_up(self, tokens: list[int]) -> list[int]:
        for size in range(self.max_ngram, self.min_ngram - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + self.num_speculative_tokens]
        return []
