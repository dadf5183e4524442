"""Computes causal attention without an [S, S] mask, and registers the attention function that `Target` uses.

Queries are [B, heads, S, head_dim], keys [B, kv heads, slots, head_dim], values and outputs [B, ..., value head_dim];
`scaling` is the scale of the scores, by default 1 / sqrt(head_dim).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from mtptrain.target.position_cache import TreeSlots
from mtptrain.utils.errors import UserError

CAUSAL_OR_MASKED = "mtptrain_causal_or_masked"
"""The name under which `causal_or_masked_attention` is registered with transformers.

No mask function is registered under this name, so transformers makes no mask: `SeenSlots` has those of all layers."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
UNUSED_KEYWORDS = (
    *("dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"),
    *("is_causal", "sliding_window"),
)
"""Arguments of an attention function that change nothing here: dropout is off, rotary positions are applied, and the
window of each layer is known from its mask."""
MOST_SCORES = 2**26
"""Most scores of all heads, rows and keys that are stored at once, where no kernel of torch can compute them."""


@dataclass(frozen=True)
class MaskOf:
    """The tokens before it that a layer's token sees; all of them by default."""

    window: int | None = None
    """Number of tokens, itself included."""
    chunk: int | None = None
    """Tokens see only their own chunk of this many positions."""


FULL = MaskOf()


@dataclass(frozen=True)
class Extras:
    """Changes that some families make to the scores of attention, beyond a scale."""

    softcap: float | None = None
    """Cap c of the scores, which become c * tanh(scores / c)."""
    sinks: torch.Tensor | None = None
    """One more score [heads] for each row, which takes probability and has no value."""

    def __bool__(self) -> bool:
        return self.softcap is not None or self.sinks is not None


PLAIN = Extras()
Attend = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float | None, Extras], torch.Tensor]
"""Attention of a head in training, such as `DepthKeys.attend`."""


@dataclass(frozen=True)
class SeenSlots:
    """The slots of a `PositionCache` that the tokens of a forward see in each layer."""

    layer_masks: tuple[MaskOf | None, ...]
    mask: torch.Tensor | None
    """The slots that hold earlier tokens, from `PositionCache.begin`; None for prompts."""
    positions: torch.Tensor
    """Positions of the tokens [B, S]."""
    tree: TreeSlots | None = None
    num_read: int = 0
    """The cache's length, from which models that count positions themselves start."""
    _made: dict[tuple[MaskOf, torch.device], torch.Tensor] = field(default_factory=dict)

    def of_layer(self, index: int, device: torch.device) -> tuple[torch.Tensor | None, MaskOf]:
        """Returns a layer's mask bool[B, 1, S, slots], None for prompts, and which tokens it lets through."""
        kind = self.layer_masks[index] or FULL
        if self.mask is None:
            return None, kind
        if (kind, device) not in self._made:
            self._made[kind, device] = self._masked(self.mask, kind).to(device)
        return self._made[kind, device], kind

    def _masked(self, mask: torch.Tensor, kind: MaskOf) -> torch.Tensor:
        """Returns the mask without the slots whose positions are outside a token's window or chunk."""
        if kind == FULL:
            return mask
        keys, queries = torch.arange(mask.shape[-1], device=mask.device), self.positions[:, None, :, None]
        if self.tree is not None:
            # A token of a tree sees its ancestors and itself: one slot for each position, in rising order.
            root, sees = self.tree.root[:, None, None], self.tree.sees
            inside = (root + torch.arange(sees.shape[2], device=mask.device)).expand_as(sees)  # [B, S, first + S]
            keys = keys.repeat(*sees.shape[:2], 1).scatter_(2, inside, root + sees.cumsum(2) - 1)[:, None]
        if kind.chunk is not None:
            return mask & (keys // kind.chunk == queries // kind.chunk)
        assert kind.window is not None
        return mask & (keys > queries - kind.window)


def tempered(module: torch.nn.Module, query: torch.Tensor, positions: torch.Tensor, num_read: int) -> torch.Tensor:
    """Returns queries [B, heads, S, head_dim] with the temperature of their own positions [B, S].

    Layers of Llama 4 without rotary embedding have scaled them already, but by positions that they count themselves,
    from the length of the cache: those of packed documents and of sequences of different lengths are others.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    floor_scale, attn_scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]

    def scale(position: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((position + 1) / floor_scale)) * attn_scale + 1

    counted = torch.arange(query.shape[2], device=query.device) + num_read
    ratio = scale(positions.to(query.device).double()) / scale(counted.double())  # [B, S]
    return (query * ratio[:, None, :, None]).to(query.dtype)


def refuse_keywords(module: torch.nn.Module, keywords: Mapping[str, object]) -> None:
    """Raises UserError for an argument that our attention functions would ignore: states would silently be others."""
    for name, value in keywords.items():
        if value is not None and name not in UNUSED_KEYWORDS:
            raise UserError(
                "target.path: attention must need no more than queries, keys, values, a scale, a mask, sinks and a "
                f"soft cap, but {type(module).__name__} passes {name}; choose another target"
            )


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None = None,
    mask: MaskOf = FULL,
    extras: Extras = PLAIN,
) -> torch.Tensor:
    """Computes causal attention without padding: a token attends to itself and, as `mask` says, to those before it."""
    length, window = query.shape[2], mask.window
    if mask.chunk is not None and length > mask.chunk:  # tokens of different chunks do not see each other
        chunks = zip(*(x.split(mask.chunk, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([causal_attention(q, k, v, scaling, FULL, extras) for q, k, v in chunks], dim=2)
    is_whole = window is None or length <= window
    is_flash = query.is_cuda and query.dtype in FLASH_DTYPES and query.shape[-1] == value.shape[-1]
    # On CUDA, only the flash kernel supports grouped keys. For other kernels, repeat keys and values: SDPA would
    # otherwise store the scores [B, heads, S, S].
    if not extras and not (is_whole and is_flash):
        key, value = (_repeat_for_query_heads(x, query.shape[1]) for x in (key, value))
    if is_whole and not extras:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
    outs = []
    size = length if window is None else window  # a block of rows sees at most two windows of keys
    if extras:
        size = min(size, max(1, MOST_SCORES // (query.shape[0] * query.shape[1] * min(2 * size, length))))
    for start in range(0, length, size):
        end, first = min(start + size, length), 0 if window is None else max(0, start + 1 - window)
        # Distance of each row from each key [rows, keys].
        distance = torch.arange(start, end)[:, None] - torch.arange(first, end)
        seen = ((distance >= 0) & (distance < (length if window is None else window))).to(query.device)
        rows, keys, values = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        outs.append(
            _attention_with_extras(rows, keys, values, seen[None, None], scaling, extras)
            if extras
            else F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scaling)
        )
    return torch.cat(outs, dim=2)


def _repeat_for_query_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    groups = num_heads // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    extras: Extras = PLAIN,
) -> torch.Tensor:
    """Computes attention of a few rows over the slots that a mask bool[B, 1, S, slots] lets each of them see.

    The query heads that share a key head become rows of one head: the cache is not copied for each of them.
    """
    if extras:
        return _attention_with_extras(query, key, value, mask, scaling, extras)
    batch, num_heads, num_rows, _ = query.shape
    groups = num_heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], groups * num_rows, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scaling)
    return out.reshape(batch, num_heads, num_rows, -1)


def _attention_with_extras(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    extras: Extras,
) -> torch.Tensor:
    """Computes `masked_attention` with stored scores, which torch's kernels would not cap or give a sink."""
    kv_heads, slots = key.shape[1], key.shape[2]
    rows = query.unflatten(1, (kv_heads, -1))  # [B, kv heads, groups, S, head_dim]
    scores = rows @ key[:, :, None].mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores.float().masked_fill(~mask[:, :, None], float("-inf"))
    if extras.sinks is not None:
        sinks = extras.sinks.float().view(1, kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., :slots].to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def causal_or_masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    seen_slots: SeenSlots | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attend: Attend | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Returns attention over a `PositionCache` [B, S, heads, value head_dim]; called by transformers.

    A head that is trained passes `attend`, which returns that of its step [S, heads, value head_dim], in which B = 1.
    """
    refuse_keywords(module, {**kwargs, "attention_mask": attention_mask})
    extras = Extras(softcap, s_aux)
    if attend is not None:
        return attend(module, query, key, value, scaling, extras)[None], None
    if seen_slots is None:
        raise UserError(
            f"target.path: a model must pass its arguments on to its attention, but {type(module).__name__} does not; "
            "choose another target"
        )
    mask, kind = seen_slots.of_layer(int(module.layer_idx), query.device)  # type: ignore[arg-type]
    query = tempered(module, query, seen_slots.positions, seen_slots.num_read)
    if mask is not None:
        return masked_attention(query, key, value, mask, scaling, extras).transpose(1, 2), None
    return causal_attention(query, key, value, scaling, kind, extras).transpose(1, 2), None


AttentionInterface.register(CAUSAL_OR_MASKED, causal_or_masked_attention)
