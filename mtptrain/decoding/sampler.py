"""Chooses tokens from logits: greedily, or at random with a temperature, top-k and top-p."""

from dataclasses import dataclass, field

import torch


@dataclass
class Sampler:
    """Chooses tokens: greedily at temperature 0, otherwise at random with its own generator."""

    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    """Probability mass of the most likely tokens to sample from; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 keeps all."""
    generator: torch.Generator | None = field(default=None, repr=False)
    """Made from `seed` on the device of the first draw, if it is None."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns (logits - max) / temperature [..., V]. Subtracting the maximum prevents overflow."""
        limits = torch.finfo(torch.float32)  # a temperature that float32 rounds to 0 would give 0 / 0
        return (logits - logits.amax(-1, keepdim=True)) / min(max(self.temperature, limits.tiny), limits.max)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the distribution [..., V] after top-k and then top-p filtering."""
        probs = self.scaled(logits.float()).softmax(-1)
        if self.top_k == 0 and self.top_p == 1.0:
            return probs
        ordered, order = probs.sort(-1, descending=True)
        ordered[..., self.top_k or ordered.shape[-1] :] = 0.0
        ordered = ordered / ordered.sum(-1, keepdim=True)
        is_kept = ordered.cumsum(-1) - ordered < self.top_p
        is_kept[..., 0] = True  # a very small top_p, or rounding in the sum, must not leave a row without a token
        ordered = torch.where(is_kept, ordered, 0.0)
        return torch.zeros_like(probs).scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))

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
