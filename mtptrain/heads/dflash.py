"""Head `dflash`: drafts a block of K tokens in one forward, attending to the target's states and to the block itself.

A block is the newest token followed by mask tokens. The only input of a token is its embedding. Each layer is a Qwen3
layer whose tokens attend to the block, and to one key per token that the target has read, projected from
hidden_norm(fc[streams]). DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036).

Variants: in causal layers a token attends to the tokens of its block up to itself instead of the whole block (JetSpec,
arXiv 2606.18394), and in sliding layers to tokens less than `sliding_window` positions before it. Each of K mask tokens
predicts the token at its own position; with `sample_from_anchor` (DeepSpec) each of the newest token and K - 1 mask
tokens predicts the token after its position.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from mtptrain.heads.attention.draft_blocks import block_attention, block_view
from mtptrain.heads.base import FirstStates, Head
from mtptrain.heads.eagle3 import resolved_layers
from mtptrain.heads.layers import Attention, HeadDims, RmsNorm, SwiGlu, head_dims, initialise
from mtptrain.heads.packing import PackedTokens
from mtptrain.settings.heads import CausalLayers, DflashConfig, mask_token_id
from mtptrain.target.families import norm_eps
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.utils.compile import fused
from mtptrain.utils.errors import UserError

NUM_CAPTURED = 5
"""Number of streams that a head captures by default, as published heads do."""


FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as configs of published heads name them."""


class LayerKind(NamedTuple):
    """How a layer attends."""

    window: int | None
    """W: a token sees the tokens less than W positions before it; None for all before it."""
    is_causal: bool


class NormedAttention(Attention):
    """Attention projections with a norm of each query head and each key head, as in Qwen3."""

    def __init__(self, dims: HeadDims, target_config: PreTrainedConfig) -> None:
        super().__init__(dims.hidden_size, dims, target_config)
        self.q_norm = RmsNorm(dims.head_dim, norm_eps(target_config))
        self.k_norm = RmsNorm(dims.head_dim, norm_eps(target_config))


class DflashLayer(nn.Module):
    """One layer of the head. Each block has R tokens, the first of which is the newest token."""

    mixes_tokens = False
    """Whether a token's output depends on the tokens before it in other ways than by attention."""

    def __init__(self, dims: HeadDims, target_config: PreTrainedConfig, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RmsNorm(dims.hidden_size, norm_eps(target_config))
        self.self_attn = NormedAttention(dims, target_config)
        self.post_attention_layernorm = RmsNorm(dims.hidden_size, norm_eps(target_config))
        self.mlp = SwiGlu(dims.hidden_size, dims.intermediate_size)

    @fused
    def keys_values_of_tokens(
        self, context: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [..., kv heads, head_dim] of the tokens that the target has read."""
        return self.self_attn.keys_values(context, positions)

    def project(
        self, x: torch.Tensor, positions: torch.Tensor, num_unread: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values of blocks x [R, ..., H]. The first `num_unread` tokens get no query.

        The norm is computed once for the queries and again for the keys and values, because Inductor cannot compile the
        backward of one norm whose output is sliced in two ways.
        """
        query = self.project_queries(x[num_unread:], positions[num_unread:])
        return query, *self.project_keys_values(x, positions)

    @fused
    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.self_attn.queries(self.attention_input(x), positions)

    @fused
    def project_keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.self_attn.keys_values(self.attention_input(x), positions)

    @fused
    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the layer, from the output of attention [..., heads, head_dim]."""
        x = residual + self.attention_output(residual, self.self_attn.o_proj(attended.flatten(-2)))
        return x + self.mlp_output(x)

    def attention_input(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what attention reads, for the residual stream x before the layer."""
        return self.input_layernorm(x)

    def attention_output(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Returns what attention adds to x, from the output of its last projection."""
        return attended

    def mlp_output(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the MLP adds to the residual stream x after attention."""
        return self.mlp(self.post_attention_layernorm(x))


class DflashHead(Head):
    """DFlash head. It drafts exactly `ttt_steps` tokens: tokens see their whole block, whose size training fixes."""

    Config = DflashConfig

    def __init__(self, config: DflashConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        dims = head_dims(config, target_config)
        hidden_size, eps = dims.hidden_size, norm_eps(target_config)
        self.mask_token_id = mask_token_id(config.mask_token_id, target_config.vocab_size)
        self.drafts_per_document = config.anchors_per_document
        self.fc = nn.Linear(len(self.capture_layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RmsNorm(hidden_size, eps)
        self.num_masks = self.ttt_steps - config.sample_from_anchor
        """Mask tokens of a block."""
        self.layers = nn.ModuleList(self._layer(config, dims, target_config, kind) for kind in layer_kinds(config))
        if config.sliding_window is not None:
            self.shared_window = config.sliding_window - self.num_masks - 1
            rows = [(block_size(config) - unread, layer.kind.window) for layer, unread in self._layers()]
            self.sliding_share = sum(count for count, window in rows if window) / sum(count for count, _ in rows)
        self.norm = RmsNorm(hidden_size, eps)
        self._add_own_vocabulary(config.draft_vocab_size, target_config)
        initialise(self, hidden_size, target_config.num_hidden_layers)

    def _layer(self, config: Any, dims: HeadDims, target_config: PreTrainedConfig, kind: LayerKind) -> DflashLayer:
        return DflashLayer(dims, target_config, kind)

    @classmethod
    def resolve_capture_layers(cls, config: DflashConfig, target_config: PreTrainedConfig) -> tuple[int, ...]:
        num_layers = int(target_config.num_hidden_layers)
        evenly = tuple(round(2 + i * (num_layers - 4) / (NUM_CAPTURED - 1)) for i in range(NUM_CAPTURED))
        return resolved_layers(config.capture_layers, evenly, num_layers)

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        """Training: compute the states [T, M, H] of the mask tokens at the draft positions; see `Head.forward`."""
        # 1. Compute the input of the keys and values of all tokens, draft positions first, then all others.
        packing = tokens.packing
        context = torch.cat(packing.split(self._run(self._context, tokens.target_states)))  # [N, H]
        context_positions = torch.cat(packing.split(packing.positions))
        # 2. Run the blocks of all draft positions through the layers.
        x = self._blocks(tokens.next_ids[packing.draft_positions], parts, ttt_steps)  # [R, M, H]
        in_block = torch.arange(len(x), device=x.device)
        positions = packing.positions[packing.draft_positions] + 1 + in_block[:, None]  # [R, M]
        kinds = {layer.kind for layer, _ in self._layers()}
        views = {kind: block_view(packing, len(x), kind.is_causal, kind.window) for kind in kinds}
        for layer, num_unread in self._layers():
            key, value = self._run(layer.keys_values_of_tokens, context, context_positions)
            query, block_key, block_value = self._run(layer.project, x, positions, num_unread)
            attended = block_attention(  # [R - num_unread, M, heads, head_dim]
                query, key, value, block_key, block_value, views[layer.kind]
            )
            x = self._run(layer.finish, x[num_unread:], attended)
        return self._run(self._normed, x[-ttt_steps:])

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Write the keys of the verified tokens, then run a block of R tokens after them; see `Head.draft_first`.

        The block's keys go to the slots of its positions, which hold rejected tokens or are empty. The next round
        overwrites these keys.
        """
        # 1. Write the keys and values of the verified tokens, which do not depend on the block.
        context = self._context(verified.states.read_by(self.read_layers))  # [B, S, H]
        cache.begin(verified.positions)
        for index, (layer, _) in enumerate(self._layers()):
            key, value = layer.keys_values_of_tokens(context, verified.positions)  # [B, S, kv heads, head_dim]
            cache.update(key.transpose(1, 2), value.transpose(1, 2), index)
        # 2. Run the block. In layers that are not causal, all its tokens see what its last one sees.
        newest = verified.num_tokens - 1  # [B]
        x = self._blocks(verified.tokens.gather(1, newest[:, None])[:, 0], parts, num_drafts)  # [R, B, H]
        positions = newest + torch.arange(len(x), device=x.device)[:, None]  # [R, B]
        mask = cache.begin(positions.T)  # [B, 1, R, slots], True up to the position of each token
        assert mask is not None
        distances = positions.T[:, None, :, None] - torch.arange(mask.shape[3], device=x.device)  # [B, 1, R, slots]
        for index, (layer, num_unread) in enumerate(self._layers()):
            query, key, value = (part.permute(1, 2, 0, 3) for part in layer.project(x, positions, num_unread))
            keys, values = cache.update(key, value, index)  # [B, kv heads, slots, head_dim]
            window, is_causal = layer.kind
            sees = mask if is_causal else mask[:, :, -1:].expand_as(mask)
            sees = sees if window is None else sees & (distances < window)
            attended = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=sees[:, :, num_unread:], enable_gqa=True
            )
            x = layer.finish(x[num_unread:], attended.permute(2, 0, 1, 3))
        states = self._normed(x[-num_drafts:]).transpose(0, 1)  # [B, K, H]
        return FirstStates(states, states[:, -1])

    def _layers(self) -> list[tuple[DflashLayer, int]]:
        """Returns the layers, each with the number of leading tokens of a block whose output is unused."""
        layers: list[DflashLayer] = list(self.layers)  # type: ignore[arg-type]
        num_unread = 1 + self.num_masks - self.ttt_steps
        return [(layer, num_unread if layer is layers[-1] and not layer.mixes_tokens else 0) for layer in layers]

    def _blocks(self, newest: torch.Tensor, parts: FrozenParts, num_drafts: int) -> torch.Tensor:
        """Returns the embeddings [R, M, H] of each block: its newest token [M], then mask tokens."""
        mask = parts.embed(torch.full((1,), self.mask_token_id, device=newest.device))
        num_masks = num_drafts - self.ttt_steps + self.num_masks
        return torch.cat([parts.embed(newest)[None], mask.expand(num_masks, len(newest), -1)])

    @fused
    def _context(self, target_states: torch.Tensor) -> torch.Tensor:
        """Returns the states [..., H] that each layer projects to keys and values."""
        return self.hidden_norm(self.fc(target_states.flatten(-2)))

    @fused
    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def block_size(config: DflashConfig) -> int:
    """Returns R, the number of tokens of a block: the newest token and the mask tokens."""
    return config.ttt_steps + (not config.sample_from_anchor)


def layer_types(config: DflashConfig) -> list[str]:
    default = [SLIDING if config.sliding_window else FULL] * config.num_layers
    if config.num_layers > 1:
        default[-1] = FULL
    kinds = default if config.layer_types is None else list(config.layer_types)
    if len(kinds) != config.num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise UserError(
            f"head.layer_types: must be {FULL} or {SLIDING} for each of head.num_layers={config.num_layers} layers, "
            f"but is {kinds}; set it, or leave it out"
        )
    if (SLIDING in kinds) != (config.sliding_window is not None):
        raise UserError(
            f"head.sliding_window: must be set if and only if a layer slides, but is {config.sliding_window} with "
            f"head.layer_types={kinds}; set both, or leave both out"
        )
    return kinds


def layer_kinds(config: DflashConfig) -> list[LayerKind]:
    size = block_size(config)
    if config.sliding_window is not None and config.sliding_window <= size:
        raise UserError(
            f"head.sliding_window: must be above {size}, the tokens of a block of head.ttt_steps="
            f"{config.ttt_steps} drafts, but is {config.sliding_window}; raise it, or train fewer depths"
        )
    if config.causal == CausalLayers.sliding and config.sliding_window is None:
        raise UserError(
            "head.causal: must be all or none without head.sliding_window, but is sliding; set one of them, or a window"
        )
    causal = {"none": (), "sliding": (SLIDING,), "all": (SLIDING, FULL)}[config.causal]
    return [
        LayerKind(config.sliding_window if kind == SLIDING else None, kind in causal) for kind in layer_types(config)
    ]
