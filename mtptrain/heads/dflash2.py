"""Head `dflash2`: DFlash with convolutions over the tokens of a block, and a selector of each draft by the one before.

In each layer, the inputs and outputs of attention and of the MLP are convolved over the tokens of a block. A
convolution adds, for each channel, the values of a token and of the tokens before it in the block, weighted by a kernel
that is the sum of a learnt one and of one that the normed input gives for groups of channels.

Each draft is one of the few tokens with the largest logits U. They are chosen from left to right by the scores
U(c) + <A[x] * P h, B[c]> of a token c after the token x, for the draft's state h. Source: `qwen3_dflash2.py` in vLLM.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.corrected import Corrected, Correction
from mtptrain.heads.dflash import DflashHead, DflashLayer, LayerKind
from mtptrain.heads.layers import HeadDims
from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import Dflash2Config
from mtptrain.utils.errors import UserError

BEFORE, AFTER = 0, 1
"""The two convolutions around attention or around an MLP."""


class Convolutions(nn.Module):
    """The convolutions before and after attention or an MLP.

    Both leave their input as it is at the start, if the projection's weights are then 0.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.num_groups = hidden_size // group_size
        identity = torch.zeros(2, kernel_size, hidden_size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.num_groups, bias=False)

    def forward(self, x: torch.Tensor, normed: torch.Tensor, side: int) -> torch.Tensor:
        """Returns the convolution of x [R, ..., H] over the R tokens of each block.

        The changes of the kernel are computed from the normed input [R, ..., H]. `side` is `BEFORE` or `AFTER`.
        """
        base = self.base_kernel[side].unflatten(-1, (self.num_groups, -1))  # [taps, groups, channels]
        projection = self.kernel_projection.weight.unflatten(0, (2, -1))[side]
        changes = F.linear(normed, projection).unflatten(-1, base.shape[:2])  # [R, ..., taps, groups]
        values = x.unflatten(-1, base.shape[1:])  # [R, ..., groups, channels]
        out = torch.zeros_like(values)
        for tap in range(min(len(base), len(x))):
            kernel = base[tap] + changes[..., tap, :, None]
            out = out + torch.cat([torch.zeros_like(values[:tap]), values[: len(x) - tap]]) * kernel
        return out.flatten(-2)


class Dflash2Layer(DflashLayer):
    """A layer of DFlash with convolutions around attention and around the MLP."""

    mixes_tokens = True

    def __init__(
        self, dims: HeadDims, target_config: PreTrainedConfig, kind: LayerKind, kernel_size: int, group_size: int
    ) -> None:
        super().__init__(dims, target_config, kind)
        self.attention_conv = Convolutions(dims.hidden_size, kernel_size, group_size)
        self.mlp_conv = Convolutions(dims.hidden_size, kernel_size, group_size)

    def attention_input(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.input_layernorm(x)
        return self.attention_conv(normed, normed, BEFORE)

    def attention_output(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.attention_conv(attended, self.input_layernorm(x), AFTER)

    def mlp_output(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.post_attention_layernorm(x)
        return self.mlp_conv(self.mlp(self.mlp_conv(normed, normed, BEFORE)), normed, AFTER)


class CandidateSelector(nn.Module):
    """Scores the candidates for a draft by the token before it."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))  # at the start, it changes nothing
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Returns the features [..., r] of drafts with states [..., H] after the tokens `previous` i64[...]."""
        return self.predecessor_codebook[previous] * self.hidden_projection(states)


class Dflash2Head(DflashHead, Corrected):
    Config = Dflash2Config

    def __init__(self, config: Dflash2Config, target_config: PreTrainedConfig) -> None:
        check_settings(config, target_config)
        super().__init__(config, target_config)
        for module in self.modules():
            if isinstance(module, Convolutions):
                nn.init.zeros_(module.kernel_projection.weight)  # for which `super` has drawn random ones
        self.candidate_selector = CandidateSelector(
            target_config.hidden_size, int(target_config.vocab_size), config.selector_rank
        )
        nn.init.normal_(self.candidate_selector.hidden_projection.weight, std=target_config.hidden_size**-0.5)
        self.num_candidates = config.selector_top_k

    def _layer(self, config: Any, dims: HeadDims, target_config: PreTrainedConfig, kind: LayerKind) -> DflashLayer:
        return Dflash2Layer(dims, target_config, kind, config.conv_kernel_size, config.conv_group_size)

    def correction(self, tokens: PackedTokens, states: torch.Tensor) -> Correction:
        return self._selection(states, tokens.before_drafts(len(states)))

    def _selection(self, states: torch.Tensor, previous: torch.Tensor) -> Correction:
        """Returns the selector's scores of drafts with states [..., H] after the tokens `previous` i64[...]."""
        features = self.candidate_selector(states, previous)
        return Correction(features, self.candidate_selector.successor_codebook, self.num_candidates)

    def corrected(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Inference: returns the scores of the candidates, and -inf for all other tokens; see `Corrected.corrected`."""
        candidates, scores = self._selection(states, previous).candidates(logits)  # [B, C]
        return torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter_(-1, candidates, scores)


def check_settings(config: Dflash2Config, target_config: PreTrainedConfig) -> None:
    """Raises UserError for settings that do not fit the target, or that no engine serves."""
    hidden_size, vocab_size = int(target_config.hidden_size), int(target_config.vocab_size)
    if hidden_size % config.conv_group_size:
        raise UserError(
            f"head.conv_group_size: must divide the target's hidden size {hidden_size}, but is "
            f"{config.conv_group_size}; set head.conv_group_size={math.gcd(hidden_size, 16)}"
        )
    if config.selector_top_k > vocab_size:
        raise UserError(
            f"head.selector_top_k: must be at most the {vocab_size} tokens of the target's vocabulary, but is "
            f"{config.selector_top_k}; lower it"
        )
    if config.draft_vocab_size is not None:
        raise UserError(
            "head.draft_vocab_size: must be null with head dflash2, whose selector knows all tokens of the target, "
            f"but is {config.draft_vocab_size}; leave it out"
        )
    if config.sample_from_anchor:
        raise UserError(
            "head.sample_from_anchor: must be false with head dflash2, because no engine drafts with the newest token "
            "of such a head, but is true; leave it out, or train head dspark"
        )


def published_settings(config: Dflash2Config) -> dict[str, int]:
    """Returns the settings that a head has beyond those of DFlash, under the names that published heads use too."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: getattr(config, name) for name in names}
