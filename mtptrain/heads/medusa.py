"""Head `medusa`: a small MLP per depth that reads only the target's state, so one forward drafts all tokens.

Depth k applies x = x + SiLU(W x) `num_layers` times to the target's last hidden state after the final norm, then the
target's frozen lm_head. The head reads no tokens and has no cache. Medusa: Simple LLM Inference Acceleration Framework
with Multiple Decoding Heads (arXiv 2401.10774), with one frozen lm_head instead of a trained one per depth.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.base import FirstStates, Head
from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import MedusaConfig
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.utils.compile import fused


@fused
def add_silu(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return residual + F.silu(x)


class ResidualMlp(nn.Module):
    """Residual blocks x = x + SiLU(W x), which start as the identity."""

    def __init__(self, hidden_size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = add_silu(x, layer(x))
        return x


class MedusaHead(Head):
    """Medusa head, which vLLM serves."""

    Config = MedusaConfig

    def __init__(self, config: MedusaConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        sizes = int(target_config.hidden_size), config.num_layers
        self.blocks = nn.ModuleList([ResidualMlp(*sizes, config.fc_bias) for _ in range(config.ttt_steps)])

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        hidden_states = tokens.target_states[tokens.packing.draft_positions]  # [M, H]
        return torch.stack([self._run(block, hidden_states) for block in self.blocks[:ttt_steps]])

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Compute all depths from the token before the newest one; see `Head.draft_first`."""
        assert num_drafts <= len(self.blocks)
        hidden_states = last_states(verified)  # [B, H]
        states = torch.stack([block(hidden_states) for block in self.blocks[:num_drafts]], dim=1)  # [B, K, H]
        return FirstStates(states, hidden_states)  # nothing is fed back


def last_states(verified: Verified) -> torch.Tensor:
    """Returns the target's post-norm state [B, H] of the token before the newest one."""
    sequences = torch.arange(len(verified.num_tokens), device=verified.num_tokens.device)
    return verified.states.postnorm_states[sequences, verified.last_index]
