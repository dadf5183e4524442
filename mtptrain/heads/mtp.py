"""Head `mtp`: one decoder layer with every RMSNorm in place, reused at all depths.

x = eh_proj[enorm(e); hnorm(h)], a full pre-norm Llama layer, final norm, the target's frozen lm_head; the post-norm state is fed
back. DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.2, with one module for all depths.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.base import Head, HeadConfig
from mtptrain.heads.layers import Attention, RmsNorm, SwiGlu, head_dims, initialise


class MtpHead(Head):
    """RMSNorm-restored multi-token-prediction head."""

    @dataclass
    class Config(HeadConfig):
        name: str = "mtp"

    def __init__(self, config: Config, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        hidden_size, eps = dims.hidden_size, target_config.rms_norm_eps
        self.enorm = RmsNorm(hidden_size, eps)
        self.hnorm = RmsNorm(hidden_size, eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # columns of the embedding first
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.self_attn = Attention(hidden_size, dims, target_config)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = SwiGlu(hidden_size, dims.intermediate_size)
        self.norm = RmsNorm(hidden_size, eps)
        initialise(self, hidden_size, target_config.num_hidden_layers)

    def attention_inputs(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.attention_inputs`."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))  # [..., H]
        return x, self.input_layernorm(x)

    def outputs(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.outputs`."""
        x = residual + self.self_attn.o_proj(attended)
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed  # read by lm_head, and fed back
