"""Head `eagle`: EAGLE-1 as published, for ablations and existing deployments.

The head computes x = fc[e; h], then a Llama layer without its input norm. The target's frozen lm_head reads the
residual stream, which is also fed back. EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv
2401.15077).
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.layers import Attention, RmsNorm, SwiGlu, head_dims, initialise
from mtptrain.settings.heads import EagleConfig
from mtptrain.target.families import norm_eps


class EagleHead(LayerHead):
    """EAGLE-1 head, whose only norm is the one before the MLP."""

    Config = EagleConfig

    def __init__(self, config: EagleConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        self.fc = nn.Linear(2 * dims.hidden_size, dims.hidden_size, bias=False)  # columns: embedding, then hidden state
        self.self_attn = Attention(dims.hidden_size, dims, target_config)
        self.post_attention_layernorm = RmsNorm(dims.hidden_size, norm_eps(target_config))
        self.mlp = SwiGlu(dims.hidden_size, dims.intermediate_size)
        initialise(self, dims.hidden_size, target_config.num_hidden_layers)

    def combine(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns fc[e; h], both as the residual stream and as the attention's input."""
        x = self.fc(torch.cat([embeddings, hidden_states], dim=-1))
        return x, x

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the MLP; `logits` reads the residual stream, which is also fed back."""
        x = residual + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x, x
