"""Computes causal attention without an [S, S] mask, and registers the attention function that `Target` uses."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from mtptrain.utils.errors import UserError

CAUSAL_OR_MASKED = "mtptrain_causal_or_masked"
"""The name under which `causal_or_masked_attention` is registered with transformers.

No mask function is registered under this name, so transformers passes the mask of `PositionCache`, or
None, through unchanged."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
UNUSED_KEYWORDS = ("dropout", "position_ids", "use_cache", "cache_position", "output_attentions")
"""Arguments of an attention function that change nothing here: dropout is off, and rotary positions are applied."""


def refuse_keywords(module: torch.nn.Module, keywords: Mapping[str, object]) -> None:
    """Raises UserError for an argument that an attention function of ours would ignore, such as `s_aux` (sinks) or
    `softcap`: the target's states and logits would silently be others."""
    for name, value in keywords.items():
        if value is not None and name not in UNUSED_KEYWORDS:
            raise UserError(
                f"target.path: attention must need no more than queries, keys, values, a scale and a window, but "
                f"{type(module).__name__} passes {name}; choose another target"
            )


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None = None, window: int | None = None
) -> torch.Tensor:
    """Computes causal attention: each token attends to itself and to the tokens before it in its sequence.

    Args:
        query: [B, heads, S, head_dim], without padding.
        key: [B, kv heads, S, head_dim].
        value: [B, kv heads, S, value head_dim].
        scaling: scale of the scores; 1 / sqrt(head_dim) by default.
        window: number of tokens that each token sees, including itself; None for all.

    Returns:
        The attention output [B, heads, S, value head_dim].
    """
    length = query.shape[2]
    is_whole = window is None or length <= window
    has_grouped_kernel = (
        is_whole and query.is_cuda and query.dtype in FLASH_DTYPES and query.shape[-1] == value.shape[-1]
    )
    # On CUDA, only the flash kernel supports grouped keys. For other kernels, repeat keys and values: SDPA would
    # otherwise store the scores [B, heads, S, S].
    if not has_grouped_kernel:
        key, value = (_repeat_for_query_heads(x, query.shape[1]) for x in (key, value))
    if window is None or length <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
    outs = []
    for start in range(0, length, window):  # a block of rows sees at most two windows of keys
        end, first = min(start + window, length), max(0, start + 1 - window)
        # Distance of each row from each key [rows, keys].
        distance = torch.arange(start, end)[:, None] - torch.arange(first, end)
        mask = ((distance >= 0) & (distance < window)).to(query.device)
        keys, values = key[:, :, first:end], value[:, :, first:end]
        outs.append(F.scaled_dot_product_attention(query[:, :, start:end], keys, values, attn_mask=mask, scale=scaling))
    return torch.cat(outs, dim=2)


def _repeat_for_query_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Computes attention of a few rows, without copying the cache for each query head of a group.

    The query heads that share a key head become rows of one head, because all of them see the same slots.

    Args:
        query: [B, heads, S, head_dim].
        key: [B, kv heads, slots, head_dim].
        value: [B, kv heads, slots, value head_dim].
        mask: bool[B, 1, S, slots], True for slots that a row sees.
        scaling: scale of the scores; 1 / sqrt(head_dim) by default.

    Returns:
        The attention output [B, heads, S, value head_dim].
    """
    batch, num_heads, num_rows, _ = query.shape
    groups = num_heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], groups * num_rows, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scaling)
    return out.reshape(batch, num_heads, num_rows, -1)


def causal_or_masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Computes masked attention if there is a mask, otherwise causal attention; called by transformers.

    Args:
        module: the layer's attention module.
        query: [B, heads, S, head_dim].
        key: [B, kv heads, slots, head_dim]. Without a mask there must be S slots.
        value: [B, kv heads, slots, value head_dim].
        attention_mask: bool[B, 1, S, slots], True for slots that a row sees. The layer's sliding window is already
            applied.
        scaling: scale of the scores.
        sliding_window: the layer's window; used only without a mask.
        kwargs: other arguments that transformers passes, which must be among `UNUSED_KEYWORDS`.

    Returns:
        The attention output [B, S, heads, value head_dim], and None in place of attention weights.
    """
    refuse_keywords(module, kwargs)
    if attention_mask is not None:
        return masked_attention(query, key, value, attention_mask, scaling).transpose(1, 2), None
    return causal_attention(query, key, value, scaling, sliding_window).transpose(1, 2), None


AttentionInterface.register(CAUSAL_OR_MASKED, causal_or_masked_attention)
