"""Head `hydra`: a small MLP per depth that reads the target's state, the next token and all tokens drafted so far.

Depth k reads the inputs c = [h; e(x_{t+1}); ...; e(x_{t+1+k})], where h is the target's last hidden state after the
final norm and e the target's frozen embedding. Its MLP is x = R c + SiLU(W c), then x = x + SiLU(W x) for each further
layer, followed by the target's frozen lm_head. The head has no cache. Hydra: Sequentially-Dependent Draft Heads for
Medusa Decoding (arXiv 2402.05109).
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.base import DepthStates, Drafted, FirstStates, Head
from mtptrain.heads.medusa import ResidualMlp, add_silu, last_states
from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import HydraConfig
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache


class HydraMlp(nn.Module):
    """The MLP of one depth. At initialization it returns the target's state unchanged."""

    def __init__(self, hidden_size: int, num_tokens: int, num_layers: int) -> None:
        super().__init__()
        input_size = (1 + num_tokens) * hidden_size  # columns: hidden state, then embeddings in the order of the tokens
        self.residual = nn.Linear(input_size, hidden_size, bias=False)
        self.first = nn.Linear(input_size, hidden_size, bias=False)
        self.rest = ResidualMlp(hidden_size, num_layers - 1, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.eye_(self.residual.weight)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns the states [..., H] from the hidden state and the embeddings, each [..., H]."""
        x = torch.cat(inputs, dim=-1)
        return self.rest(add_silu(self.residual(x), self.first(x)))


class HydraHead(Head):
    """Hydra head. No engine has a class for it."""

    Config = HydraConfig

    def __init__(self, config: HydraConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        self.hidden_size = int(target_config.hidden_size)
        self.mlps = nn.ModuleList(
            [HydraMlp(self.hidden_size, 1 + depth, config.num_layers) for depth in range(config.ttt_steps)]
        )

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        draft_positions = tokens.packing.draft_positions
        inputs = [tokens.target_states[draft_positions]]  # [M, H]
        embeddings = F.pad(parts.embed(tokens.next_ids[draft_positions]), (0, 0, 0, ttt_steps - 1))  # [M + T - 1, H]
        states = []
        for depth, mlp in enumerate(self.mlps[:ttt_steps]):
            inputs.append(embeddings[depth : depth + len(draft_positions)])
            states.append(self._run(mlp, *inputs))
        return torch.stack(states)

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Run depth 0 on the token before the newest one; see `Head.draft_first`.

        The head feeds back its inputs [B, 2 H], to which each later depth appends an embedding.
        """
        assert num_drafts <= len(self.mlps)
        newest = verified.tokens.gather(1, verified.num_tokens[:, None] - 1)[:, 0]  # [B]
        inputs = torch.cat([last_states(verified), parts.embed(newest)], dim=-1)  # [B, 2 H]
        return FirstStates(self.mlps[0](inputs)[:, None], inputs)

    def draft_next(self, drafted: Drafted, parts: FrozenParts, cache: PositionCache) -> DepthStates:
        """Run depth k on the inputs of the previous depth [B, W, (k + 1) H] and the token drafted there."""
        inputs = torch.cat([drafted.fed_back, parts.embed(drafted.tokens)], dim=-1)  # [B, W, (k + 2) H]
        depth = inputs.shape[-1] // self.hidden_size - 2
        return self.mlps[depth](inputs), inputs
