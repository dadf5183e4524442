"""What proposes tokens to `speculate`: a head, or the text so far."""

import torch

from mtptrain.heads.base import Head
from mtptrain.speculate import Draft, Sampler, Verified
from mtptrain.target import FrozenParts, PositionCache


class HeadDrafter:
    """Drafts a chain of K tokens with a head."""

    def __init__(self, head: Head, parts: FrozenParts, num_speculative_tokens: int) -> None:
        self.head = head
        self.parts = parts
        self.num_speculative_tokens = num_speculative_tokens
        self.cache = PositionCache(0)

    def start(self, batch_size: int, num_slots: int) -> None:
        self.cache = PositionCache(num_slots)

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        next_tokens = verified.tokens.gather(1, verified.positions + 1)  # [B, S]
        states = self._step(verified.hidden_states, next_tokens, verified.positions)  # [B, S, H]
        state = states[torch.arange(len(states), device=states.device), verified.last_row]  # [B, H]
        position = verified.num_tokens - 2  # [B]
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for depth in range(self.num_speculative_tokens):
            if depth > 0:
                position = position + 1
                state = self._step(state[:, None], tokens[-1][:, None], position[:, None])[:, 0]
            logits = self.parts.logits(state)  # [B, V]
            if not sampler.is_greedy:
                probs.append(sampler.probs(logits))
            tokens.append(logits.argmax(-1) if sampler.is_greedy else sampler.sample(probs[-1]))
        drafted = torch.stack(tokens, 1)  # [B, K]
        return Draft(drafted, torch.ones_like(drafted, dtype=torch.bool), torch.stack(probs, 1) if probs else None)

    def _step(self, hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head.decode(hidden_states, self.parts.embed(tokens), positions, self.cache)


class PromptLookupDrafter:
    """Drafts what followed the last earlier occurrence of the newest tokens: the baseline that needs no training.

    The longest suffix of `max_ngram` .. `min_ngram` tokens that occurs before wins, and its latest occurrence.
    """

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
