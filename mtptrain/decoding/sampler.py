"""Chooses tokens from logits: greedily or at random, with the sampling parameters of a server.

Biases and penalties come first. They change greedy choices too, and penalties depend on the text, so `speculate`
computes `Sampler.processed` logits of the target for every position of a draft. Temperature and filters follow, in the
order of an engine. Drafts see the temperature, but neither biases nor penalties, min-p and top-p.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class History:
    """The texts before C choices in each sequence, which penalties count. S is the number of slots for tokens."""

    tokens: torch.Tensor  # i64[B, S]
    is_prompt: torch.Tensor
    """bool[B, S]: the slots of the prompt."""
    is_output: torch.Tensor
    """bool[B, C, S]: the slots of tokens that were generated, or drafted, before a choice."""

    @classmethod
    def of(cls, tokens: torch.Tensor, prompt_lengths: torch.Tensor, num_tokens: torch.Tensor) -> "History":
        """Returns the text before one choice: the first `num_tokens` [B] of the tokens [B, S]."""
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        is_prompt = slots < prompt_lengths[:, None]
        return cls(tokens, is_prompt, (~is_prompt & (slots < num_tokens[:, None]))[:, None])

    def with_drafts(self, drafts: torch.Tensor, ancestors: torch.Tensor) -> "History":
        """Returns the texts before the choices after the newest token and after each of the drafts [B, P].

        `ancestors` are those of `Draft.ancestors`.
        """
        is_output = self.is_output.expand(-1, ancestors.shape[1], -1)  # [B, 1 + P, S]
        return History(
            torch.cat([self.tokens, drafts], 1),
            F.pad(self.is_prompt, (0, drafts.shape[1])),
            torch.cat([is_output, ancestors[:, :, 1:]], 2),
        )

    def counts(self, is_counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns how often the slots that are counted, bool[B, C, S], hold each token f32[B, C, V]."""
        counts = torch.zeros(*is_counted.shape[:2], vocab_size + 1, device=self.tokens.device)
        tokens = self.tokens.clamp(max=vocab_size)  # a target may read tokens that it cannot generate
        return counts.scatter_add_(2, tokens[:, None].expand_as(is_counted), is_counted.float())[..., :vocab_size]


@dataclass
class Sampler:
    """Chooses tokens: greedily at temperature 0, otherwise at random with its own generator."""

    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    """Probability mass of the most likely tokens to sample from; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 keeps all."""
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest token's probability are not sampled; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens of prompt and output, and multiplies the negative ones; 1 is none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token each time that it occurs in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens; a token with -inf is never chosen."""
    order: tuple[str, ...] = ("temperature", "min_p", "top_k", "top_p")
    """Order of temperature and filters: that of vLLM, unless an engine has another."""
    draft_top_k: int = 0
    """Number of most likely tokens that drafts are sampled from; 0 keeps all, as vLLM does."""
    generator: torch.Generator | None = field(default=None, repr=False)
    """Made from `seed` on the device of the first draw, if it is None."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias)

    def processed(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        """Returns the target's logits f32[B, C, V] with biases and penalties.

        The definitions are those of transformers (repetition) and of OpenAI's API (presence, frequency).
        """
        logits, vocab_size = logits.float(), logits.shape[-1]
        if self.logit_bias:
            tokens, biases = (torch.tensor(list(each)) for each in zip(*self.logit_bias.items(), strict=True))
            bias = torch.zeros(vocab_size).index_copy(0, tokens, biases.float())
            logits = logits + bias.to(logits.device)
        if not self.has_penalties:
            return logits
        num_outputs = history.counts(history.is_output, vocab_size)  # [B, C, V]
        is_seen = (num_outputs + history.counts(history.is_prompt[:, None], vocab_size)) > 0
        penalty = torch.where(is_seen, self.repetition_penalty, 1.0)
        logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        return logits - self.frequency_penalty * num_outputs - self.presence_penalty * (num_outputs > 0)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns (logits - max) / temperature [..., V]. Subtracting the maximum prevents overflow."""
        limits = torch.finfo(torch.float32)  # a temperature that float32 rounds to 0 would give 0 / 0
        return (logits - logits.amax(-1, keepdim=True)) / min(max(self.temperature, limits.tiny), limits.max)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the target's distribution [..., V] after temperature and filters, in their order."""
        logits = logits.float()
        for step in self.order:
            if step == "temperature":
                logits = self.scaled(logits)
            elif step == "min_p" and self.min_p:
                logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(self.min_p), -math.inf)
            elif step == "top_k":
                logits = likeliest(logits, self.top_k)
            elif step == "top_p" and self.top_p < 1:
                ordered, order = logits.softmax(-1).sort(-1, descending=True)
                is_dropped = ordered.cumsum(-1) - ordered >= self.top_p
                is_dropped[..., 0] = False  # neither a very small top_p nor rounding leaves a row without a token
                logits = logits.masked_fill(is_dropped.scatter(-1, order, is_dropped), -math.inf)
        return logits.softmax(-1)

    def draft_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the distribution [..., V] that drafts are sampled from."""
        return self.scaled(likeliest(logits.float(), self.draft_top_k)).softmax(-1)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns a token [...] for each row of logits [..., V]: the most likely one if greedy, else a sampled one."""
        if self.is_greedy:
            return logits.argmax(-1)
        return self.sample(self.probs(logits).flatten(0, -2)).view(logits.shape[:-1])

    def sample(self, probs: torch.Tensor) -> torch.Tensor:
        """Draws one token [B] per row of weights [B, V], which need not sum to one."""
        return torch.multinomial(probs, 1, generator=self._generator(probs.device))[:, 0]

    def uniform_like(self, like: torch.Tensor) -> torch.Tensor:
        """Draws uniform numbers in [0, 1) in the shape of `like`."""
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device, dtype=like.dtype)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator


def likeliest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the logits [..., V] without all but the `top_k` largest, and those equal to the last; 0 keeps all."""
    if not 0 < top_k < logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
