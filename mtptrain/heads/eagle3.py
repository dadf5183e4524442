"""Head `eagle3`: fuses captured layers of the target, by default three, and can have a smaller draft vocabulary.

The head is g = fc[streams], one layer whose attention reads [input_layernorm(e); hidden_norm(g)] for the embedding e of
the next token, and a final norm before lm_head. EAGLE-3 feeds back the residual stream before that norm: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test (arXiv 2503.01840). With `norm_output`, the
default, the state after it is fed back, as in EAGLE-3.1 (arXiv 2605.09992), which has `fc_norm` too.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.layers import Attention, RmsNorm, SwiGlu, head_dims, initialise
from mtptrain.settings.heads import Eagle3Config
from mtptrain.target.families import norm_eps
from mtptrain.utils.errors import UserError


class Eagle3Head(LayerHead):
    Config = Eagle3Config

    def __init__(self, config: Eagle3Config, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        hidden_size, eps, num_captured = dims.hidden_size, norm_eps(target_config), len(self.capture_layers)
        self.norm_output, self.norm_before_residual = config.norm_output, config.norm_before_residual
        self.input_norm = RmsNorm(num_captured * hidden_size, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([RmsNorm(hidden_size, eps) for _ in range(num_captured)]) if config.fc_norm else None
        )
        self.fc = nn.Linear(num_captured * hidden_size, hidden_size, bias=False)
        self.input_layernorm = RmsNorm(hidden_size, eps)
        self.hidden_norm = RmsNorm(hidden_size, eps)
        self.self_attn = Attention(2 * hidden_size, dims, target_config)  # columns: embedding, then hidden state
        self.post_attention_layernorm = RmsNorm(hidden_size, eps)
        self.mlp = SwiGlu(hidden_size, dims.intermediate_size)
        self.norm = RmsNorm(hidden_size, eps)
        self._add_own_vocabulary(config.draft_vocab_size, target_config)
        initialise(self, hidden_size, target_config.num_hidden_layers)

    @classmethod
    def resolve_capture_layers(cls, config: Eagle3Config, target_config: PreTrainedConfig) -> tuple[int, ...]:
        num_layers = int(target_config.num_hidden_layers)
        return resolved_layers(config.capture_layers, (2, num_layers // 2, num_layers - 3), num_layers)

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """Project the captured streams [..., L, H] to one hidden state [..., H]."""
        streams = target_states.flatten(-2)  # [..., L * H]
        if self.input_norm is not None:
            streams = self.input_norm(streams)
        if self.fc_norm is not None:
            parts = streams.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            streams = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(streams)

    def combine(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the residual stream and attention's input. The stream is g, normed with `norm_before_residual`."""
        normed = self.hidden_norm(hidden_states)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return normed if self.norm_before_residual else hidden_states, x

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the MLP. The stream is fed back before the norm; with `norm_output` normed, as `logits` reads it."""
        x = residual + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed if self.norm_output else x


def can_capture(layers: Sequence[int], num_layers: int) -> bool:
    """Returns whether these are different layers, in rising order, of a target of `num_layers` decoder layers."""
    return bool(layers) and list(layers) == sorted(set(layers)) and layers[0] >= 0 and layers[-1] <= num_layers


def resolved_layers(configured: Sequence[int] | None, usual: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the layers that a head captures from a target of `num_layers` decoder layers.

    Without configured ones, these are the usual layers, or for a target too shallow for them its first, middle and last
    but one.
    """
    shallow = (1, num_layers // 2, num_layers - 1)
    choices: list[Sequence[int]] = [usual, shallow] if configured is None else [configured]
    for layers in choices:
        if can_capture(layers, num_layers):
            return tuple(layers)
    raise UserError(
        f"head.capture_layers: must be different layers in rising order within 0..{num_layers}, where 0 is the "
        f"target's embeddings and {num_layers} its last decoder layer, but are {list(choices[0])}; set them"
    )
