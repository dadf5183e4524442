"""Head `mtp`: one decoder layer with every RMSNorm in place, reused at all depths.

x = eh_proj[enorm(e); hnorm(h)], a full pre-norm Llama layer, final norm, the target's frozen lm_head; the post-norm state is fed
back. DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.2, with one module for all depths.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.layers import Attention, RmsNorm, SwiGlu, head_dims, initialise


class RestoredNorm(StrEnum):
    """RMSNorms that EAGLE-1 left out."""

    enorm = "enorm"
    hnorm = "hnorm"
    input_layernorm = "input_layernorm"
    norm = "norm"


class MtpHead(Head):
    """RMSNorm-restored multi-token-prediction head."""

    @dataclass
    class Config(HeadConfig):
        name: str = "mtp"
        norms: list[RestoredNorm] = field(default_factory=lambda: list(RestoredNorm))
        """Those that it has; engines serve it with all of them, fewer are for `recipes/study/norms.yaml`."""

        def __post_init__(self) -> None:
            self.norms = [norm for norm in RestoredNorm if norm in self.norms]

    def __init__(self, config: Config, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        hidden_size, eps = dims.hidden_size, target_config.rms_norm_eps
        restored = {name: RmsNorm(hidden_size, eps) if name in config.norms else nn.Identity() for name in RestoredNorm}
        self.enorm = restored[RestoredNorm.enorm]
        self.hnorm = restored[RestoredNorm.hnorm]
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # columns of the embedding first
        self.input_layernorm = restored[RestoredNorm.input_layernorm]
        self.self_attn = Attention(hidden_size, dims, target_config)
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = SwiGlu(hidden_size, dims.intermediate_size)
        self.norm = restored[RestoredNorm.norm]
        initialise(self, hidden_size, target_config.num_hidden_layers)

    @property
    def joint_layers(self) -> tuple[nn.Linear, ...]:
        """See `Head.joint_layers`."""
        return (self.eh_proj,)

    @property
    def joint_norms(self) -> tuple[RmsNorm | None, RmsNorm | None]:
        """See `Head.joint_norms`."""
        of_embeddings, of_states = (norm if isinstance(norm, RmsNorm) else None for norm in (self.enorm, self.hnorm))
        return of_embeddings, of_states

    def layer_inputs(self, hidden_states: torch.Tensor, joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.layer_inputs`."""
        return joint, self.input_layernorm(joint)

    def outputs(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head.outputs`."""
        x = residual + self.self_attn.o_proj(attended)
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed  # read by lm_head, and fed back
