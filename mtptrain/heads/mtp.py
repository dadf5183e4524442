"""Head `mtp`: one decoder layer with all its RMSNorms, shared by all depths.

It combines an embedding e and a state h into x = eh_proj[enorm(e); hnorm(h)], which passes through a full pre-norm
Llama layer, a final norm and the target's frozen lm_head. The state after the final norm is fed back. This is section
2.2 of the DeepSeek-V3 Technical Report (arXiv 2412.19437), except that all depths share one module.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.layers import Attention, RmsNorm, SwiGlu, head_dims, initialise
from mtptrain.settings.heads import MtpConfig
from mtptrain.target.families import norm_eps


class MtpHead(LayerHead):
    """Multi-token-prediction head with all RMSNorms."""

    Config = MtpConfig

    def __init__(self, config: MtpConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        hidden_size, eps = dims.hidden_size, norm_eps(target_config)
        self.enorm = RmsNorm(hidden_size, eps)
        self.hnorm = RmsNorm(hidden_size, eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # columns: embedding, then hidden state
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.self_attn = Attention(hidden_size, dims, target_config, config.attention_bias)
        self.zero_first_embedding = config.zero_first_embedding
        if config.prenorm_states:
            self.read_layers = (int(target_config.num_hidden_layers),)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = SwiGlu(hidden_size, dims.intermediate_size)
        self.norm = RmsNorm(hidden_size, eps)
        initialise(self, hidden_size, target_config.num_hidden_layers)

    def combine(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x = eh_proj[enorm(e); hnorm(h)] as the residual stream, and input_layernorm(x)."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))
        return x, self.input_layernorm(x)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the MLP and the final norm; `logits` reads the normed states, which are also fed back."""
        x = residual + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed


def swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """Returns a projection [H, 2H] with its halves (embedding and hidden state) swapped, which is MiMo's layout."""
    return torch.cat(weight.chunk(2, dim=-1)[::-1], dim=-1)
