"""Head `dspark`: DFlash whose drafts know the draft before them, and say how likely they are to be accepted.

One forward gives logits U for all K drafts, as in `dflash`. Then, from left to right, the logits of a draft are
U + W2 W1[token before]: a correction of low rank by the token before it, which is the newest token or the draft just
chosen. The confidence of a draft is sigmoid(w [h; W1[token before]] + b), for its state h: the probability that it is
accepted once all drafts before it were. DSpark (arXiv 2607.05147), with the Markov head that engines call `vanilla`.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.corrected import Confident, Corrected, Correction
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import DsparkConfig


class MarkovHead(nn.Module):
    """Parameters of the correction of a draft's logits by the token before it."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # at the start, drafts are those of `dflash`


class ConfidenceHead(nn.Module):
    """Parameters of the logit of the probability that a draft is accepted."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class DsparkHead(DflashHead, Corrected, Confident):
    Config = DsparkConfig

    def __init__(self, config: DsparkConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        vocab_size = int(target_config.vocab_size)
        self.markov_head = MarkovHead(vocab_size, config.draft_vocab_size or vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(target_config.hidden_size, config.markov_rank)

    def correction(self, tokens: PackedTokens, states: torch.Tensor) -> Correction:
        previous = tokens.before_drafts(len(states))
        return Correction(self.markov_head.markov_w1(previous), self.markov_head.markov_w2.weight)

    def corrected(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return logits + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))

    def confidence_of(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return self._confidence_logits(states, self.markov_head.markov_w1(previous)).float().sigmoid()

    @torch.no_grad()
    def calibrate(self, scale: float, shift: float) -> None:
        self.confidence_head.proj.weight.mul_(scale)
        self.confidence_head.proj.bias.mul_(scale).add_(shift)

    def confidence(self, states: torch.Tensor, correction: Correction) -> torch.Tensor:
        return self._confidence_logits(states, correction.features)

    def _confidence_logits(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns logits [...] for states [..., H] and W1 of the tokens before [..., r]."""
        return self.confidence_head.proj(torch.cat([states, embedded], -1))[..., 0]
