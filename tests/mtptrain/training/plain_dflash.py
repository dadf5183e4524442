"""Head `dflash` and its kin by their definition: one draft position after another, each over a block of its own."""

import torch

from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead, DflashLayer
from mtptrain.heads.dflash2 import Convolutions, Dflash2Head, Dflash2Layer
from mtptrain.heads.dspark import DsparkHead
from mtptrain.target.frozen_parts import FrozenParts


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 10_000.0) -> torch.Tensor:
    """RoPE of x [S, heads, d] by its definition: the pairs (i, i + d / 2) turn by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    turns = torch.polar(torch.ones(()), positions[:, None] * theta ** (-torch.arange(half) / half))[:, None]
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


def plain_convolution(conv: Convolutions, x: torch.Tensor, normed: torch.Tensor, side: int) -> torch.Tensor:
    """The convolution of a block [R, H] by its definition, one token after another."""
    base = conv.base_kernel[side]  # [taps, H]
    changes = (normed @ conv.kernel_projection.weight.T).view(len(x), 2, len(base), -1)[:, side]  # [R, taps, groups]
    group_of = torch.arange(x.shape[1]) // (x.shape[1] // changes.shape[2])
    rows = []
    for row in range(len(x)):
        taps = range(min(len(base), row + 1))
        rows.append(sum(((base[tap] + changes[row, tap, group_of]) * x[row - tap] for tap in taps), torch.zeros(())))
    return torch.stack(rows)


def plain_layer(layer: DflashLayer, x: torch.Tensor, context: torch.Tensor, first_position: int) -> torch.Tensor:
    """One layer over a block [R, H], whose first token is at `first_position`, and all tokens before it [S, H]."""
    attention, heads = layer.self_attn, (-1, layer.self_attn.head_dim)
    positions = torch.arange(first_position, first_position + len(x))
    before = normed = layer.input_layernorm(x)
    if isinstance(layer, Dflash2Layer):
        normed = plain_convolution(layer.attention_conv, before, before, 0)
    read, everywhere = torch.cat([context, normed]), torch.arange(first_position + len(x))
    query = rotated(attention.q_norm(attention.q_proj(normed).unflatten(-1, heads)), positions)
    key = rotated(attention.k_norm(attention.k_proj(read).unflatten(-1, heads)), everywhere)
    value = attention.v_proj(read).unflatten(-1, heads)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    window, is_causal = layer.kind
    for row, position in enumerate(positions.tolist()):
        for other in range(key.shape[0]):
            is_later = is_causal and other > position
            if is_later or (window is not None and position - other >= window):
                scores[:, row, other] = -torch.inf
    weights = scores.softmax(-1)
    attended = attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(-2))
    if not isinstance(layer, Dflash2Layer):
        x = x + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))
    x = x + plain_convolution(layer.attention_conv, attended, before, 1)
    normed = layer.post_attention_layernorm(x)
    out = layer.mlp(plain_convolution(layer.mlp_conv, normed, normed, 0))
    return x + plain_convolution(layer.mlp_conv, out, normed, 1)


def plain_block(
    head: DflashHead, depths: int, ids: list[int], captured: torch.Tensor, start: int, frozen: FrozenParts
) -> torch.Tensor:
    """The states of all depths [T, H] at one draft position."""
    context = head.hidden_norm(head.fc(captured[: start + 1].flatten(1)))
    num_masks = depths - (head.num_masks < head.ttt_steps)  # the newest token drafts too
    x = frozen.embed(torch.tensor([ids[start + 1], *[head.mask_token_id] * num_masks]))
    for layer in head.layers:
        x = plain_layer(layer, x, context, start + 1)
    return head.norm(x)[-depths:]


def plain_logits(head: Head, state: torch.Tensor, previous: int, frozen: FrozenParts) -> torch.Tensor:
    logits = state @ head.output_weight(frozen).T
    if isinstance(head, DsparkHead):
        markov = head.markov_head
        logits = logits + markov.markov_w2.weight @ markov.markov_w1.weight[previous]
    return logits


def plain_selected(
    head: Head, state: torch.Tensor, previous: int, frozen: FrozenParts
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The candidates and their scores."""
    if not isinstance(head, Dflash2Head):
        return None
    logits, selector = state @ frozen.lm_head.T, head.candidate_selector
    candidates = logits.argsort(descending=True)[: head.num_candidates]
    projected = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ state)
    return candidates, logits[candidates] + selector.successor_codebook[candidates] @ projected


def plain_confidence(head: Head, state: torch.Tensor, previous: int) -> torch.Tensor | None:
    if not isinstance(head, DsparkHead):
        return None
    proj, embedded = head.confidence_head.proj, head.markov_head.markov_w1.weight[previous]
    return proj.weight[0] @ torch.cat([state, embedded]) + proj.bias[0]
