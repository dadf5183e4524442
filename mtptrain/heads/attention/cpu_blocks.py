"""Computes attention of packed segments on a CPU, in blocks of matmuls or with torch's flash kernel.

A CPU's flash kernel reaches only a tenth to a third of the matmul peak; matmuls of blocks that fit into the cache are
usually faster. In a causal segment, which has as many keys as queries, query i sees keys 0 .. i; in other segments each
query sees all keys. Functions that compute a batch of segments take queries [segments, heads, rows, ...] and keys
[segments, kv heads, keys, ...].
"""

import math
from collections.abc import Iterator
from itertools import groupby

import torch
import torch.nn.functional as F

from mtptrain.heads.packing import Segments
from mtptrain.utils.compile import fused

aten = torch.ops.aten
ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether this CPU has matrix instructions for bf16 (AMX tiles)."""
SHORT_TOKENS = 1024
"""Maximum number of tokens in a causal segment for which blocks are faster than the flash kernel."""
BATCH_TOKENS = 2048
"""Maximum number of tokens in segments that are computed together, to limit the memory of their scores. A longer
segment is computed alone."""
MAX_FLASH_OFFSET = 32
"""Largest gap between lse and estimated row maximum, in raw scores, at which `_flash` is accurate enough in bf16."""
BLOCK_ROWS, KEY_MULTIPLE = 128, 32
"""Number of rows in a block of a causal segment, and the multiple to which its keys are padded: other sizes take up
to twice as long."""
BLOCK_SCORES, MIN_BLOCK_ROWS = 2**22, 256
"""Maximum number of scores in an unmasked forward block, over all heads. A block has at least MIN_BLOCK_ROWS rows, over
all heads, even if it then has more scores."""
BLOCK_KEYS, BACKWARD_ROWS = 1024, 1024
"""Number of keys and of rows in an unmasked backward block. Rows are counted over all query heads of a group."""


def attend_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments) -> ThreeTensors:
    """Attend from each segment's queries [Q, heads, head_dim] to its keys [S, kv heads, head_dim].

    Returns:
        The output [Q, heads, head_dim], its log-sum-exp f32[Q, heads], and each row's approximate maximum raw score
        f32[Q, heads].
    """
    out, (lse, row_max) = query.new_empty(query.shape), query.new_empty(2, *query.shape[:2], dtype=torch.float32)
    for queries, keys in _batches(segments):
        inputs = _batch(query, queries), _batch(key, keys), _batch(value, keys)
        if _uses_blocks(segments, keys) and not _has_fast_flash(query, keys):
            results = block_attention(*inputs, segments.is_causal)
        else:
            results = _flash(*inputs, segments.is_causal)
        for packed, result in zip((out, lse, row_max), results, strict=True):
            _batch(packed, queries).copy_(result)
    return out, lse, row_max


def attend_on_cpu_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    row_max: torch.Tensor,
    segments: Segments,
) -> ThreeTensors:
    """Returns the gradients of query, key and value.

    The output and lse may be those of a larger softmax, over keys outside the segments too.
    """
    grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    for queries, keys in _batches(segments):
        batch_grad, batch_out, batch_lse, batch_max = (_batch(x, queries) for x in (grad_out, out, lse, row_max))
        inputs = _batch(query, queries), _batch(key, keys), _batch(value, keys)
        if _uses_blocks(segments, keys):
            results = block_attention_backward(batch_grad, *inputs, batch_out, batch_lse, batch_max, segments.is_causal)
        else:
            results = _flash_backward(batch_grad, *inputs, batch_out, batch_lse)
        for packed, batch, result in zip(grads, (queries, keys, keys), results, strict=True):
            _batch(packed, batch).copy_(result)
    return grads


Batch = tuple[int, int, int]
"""Consecutive segments of equal length: first row, number of segments, number of rows in each."""


def _batches(segments: Segments) -> Iterator[tuple[Batch, Batch]]:
    """Yield all segments in order, as pairs of batches: the queries and the keys of one call."""
    first_query = first_key = 0
    for (queries, keys), equal in groupby(segments.lengths):
        left, largest = len(list(equal)), max(1, BATCH_TOKENS // max(queries, keys, 1))
        while left:
            count = min(left, largest)
            yield (first_query, count, queries), (first_key, count, keys)
            first_query, first_key, left = first_query + count * queries, first_key + count * keys, left - count


def _batch(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """View a batch of packed rows [Q, heads, ...] as [segments, heads, rows, ...]."""
    first, count, length = batch
    return x[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _uses_blocks(segments: Segments, keys: Batch) -> bool:
    return not segments.is_causal or keys[2] <= SHORT_TOKENS


def _has_fast_flash(query: torch.Tensor, keys: Batch) -> bool:
    """Returns whether the flash forward is faster than blocks (in bf16 with AMX tiles) and accurate enough."""
    if not HAS_TILES or query.dtype != torch.bfloat16:
        return False
    return math.log(keys[2]) / 2 * query.shape[-1] ** 0.5 < MAX_FLASH_OFFSET


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> ThreeTensors:
    """Compute the results of `block_attention` with a flash kernel, which does not return the row maximum.

    The row maximum is therefore estimated from the lse. The scaled maximum is log n below the lse if all n scores are
    equal, and equals the lse if one score dominates; the estimate is (log n) / 2 below the lse. This gap is converted
    to raw scores and rounded to the query's dtype. A dominating score is larger than the estimate by exactly this gap,
    so that the difference has no rounding error in that dtype.
    """
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_repeat_groups(query, key, value), 0.0, is_causal)
    num_keys = torch.arange(1 if is_causal else key.shape[2], key.shape[2] + 1)  # seen by each row, or by all rows
    gap = (num_keys.log() / 2 * query.shape[-1] ** 0.5).to(query.dtype)
    return out, lse, lse * query.shape[-1] ** 0.5 - gap


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> ThreeTensors:
    """Returns the gradients of query, key and value of causal segments."""
    tensors = [x.contiguous() for x in (grad_out, *_repeat_groups(query, key, value), out, lse)]
    grad_query, *grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, True)
    grad_key, grad_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in grads)
    return grad_query, grad_key, grad_value


def _repeat_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ThreeTensors:
    """Repeat keys and values for each query head: a CPU's flash kernel does not support grouped-query attention."""
    groups = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def block_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> ThreeTensors:
    """Attend in blocks of rows.

    The scores of a bf16 product are rounded to bf16. They are therefore computed twice: first to find each row's
    maximum, then with this maximum subtracted inside the product, so that only the distance to the maximum is rounded.

    Returns:
        The output [segments, heads, rows, head_dim], its lse f32[segments, heads, rows], and each row's approximate
        maximum raw score f32[segments, heads, rows].
    """
    groups, scale, num_keys = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5, key.shape[2]
    num_heads = query.shape[0] * query.shape[1]  # over all segments, which share one mask
    grouped = query.unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim]
    key, value = (_padded(x, is_causal) for x in (key, value))
    key_and_ones = _with_ones(key)
    out, row_stats = grouped.new_empty(grouped.shape), grouped.new_empty(2, *grouped.shape[:-1], dtype=torch.float32)
    all_heads_rows = max(MIN_BLOCK_ROWS, BLOCK_SCORES // num_keys)
    num_rows = BLOCK_ROWS if is_causal else max(1, all_heads_rows // num_heads)
    for first in range(0, query.shape[2], num_rows):
        # 1. The first product gives each row's maximum.
        rows = slice(first, first + num_rows)
        keys = slice(first + num_rows) if is_causal else slice(num_keys)
        block_query = grouped[..., rows, :].flatten(2, 3)
        scores = block_query @ key[..., keys, :].mT
        mask = _causal_mask(scores, groups, first) if is_causal else None
        row_max = _row_max(_flat_rows(scores), mask, num_heads).view(scores.shape[:3])
        # 2. The second product subtracts it.
        if scores.dtype == torch.float32:
            scores -= row_max[..., None]
        else:
            scores = _with_subtracted(block_query, row_max) @ key_and_ones[..., keys, :].mT
        # 3. Softmax and output.
        flat_probs, flat_total = _probs(_flat_rows(scores), mask, num_heads, scale)
        probs, total = flat_probs.view(scores.shape), flat_total.view(scores.shape[:3])
        out[..., rows, :] = (probs @ value[..., keys, :]).unflatten(2, (groups, -1))
        row_stats[..., rows] = torch.stack([row_max * scale + total.log(), row_max]).unflatten(3, (groups, -1))
    lse, row_maxes = row_stats.flatten(2, 3)
    return out.flatten(1, 2), lse, row_maxes


def block_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    row_max: torch.Tensor,
    is_causal: bool,
) -> ThreeTensors:
    """Returns the gradients of query, key and value; see `attend_on_cpu_backward`.

    As in `block_attention`, the products include a subtraction: Q K minus the row maxima, and dO V minus
    rowsum(dO * O).
    """
    # 1. Append the columns for the subtraction, and allocate the sums over blocks in fp32.
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    wide_query, wide_grad = (
        _with_subtracted(x, subtracted).unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows, head_dim + 2]
        for x, subtracted in ((query, row_max), (grad_out, _row_products(grad_out, out)))
    )
    log_totals = (lse - row_max * scale).unflatten(1, (-1, groups))  # [segments, kv heads, groups, rows]
    num_keys, num_heads = key.shape[2], query.shape[0] * query.shape[1]
    key, value = (_padded(x, is_causal) for x in (key, value))
    wide_key, wide_value = _with_ones(key), _with_ones(value)
    # Each row of a causal segment is in only one block, so its gradient needs no sum in fp32.
    grad_query = torch.zeros_like(wide_query[..., :-2], dtype=query.dtype if is_causal else torch.float32)
    # These are stored transposed [..., head_dim, keys], because CPU matmuls would otherwise be up to a third slower.
    grad_key, grad_value = (x.new_zeros(x.mT.shape, dtype=torch.float32) for x in (key, value))
    for rows, keys in _blocks(query.shape[2], num_keys, groups, is_causal):
        # 2. Recompute the probabilities, and the gradients of the scores.
        block_query, block_grad = (x[..., rows, :].flatten(2, 3) for x in (wide_query, wide_grad))
        scores, grad_probs = block_query @ wide_key[..., keys, :].mT, block_grad @ wide_value[..., keys, :].mT
        mask = _causal_mask(scores, groups, rows.start) if is_causal else None
        log_total = log_totals[..., rows].flatten(2, 3)
        flat = _score_grads(_flat_rows(scores), _flat_rows(grad_probs), _flat_rows(log_total), mask, num_heads, scale)
        probs, grad_scores = (x.view_as(scores) for x in flat)
        # 3. Add the block's part of each gradient.
        grad_query[..., rows, :] += (grad_scores @ key[..., keys, :]).unflatten(2, (groups, -1))
        grad_key[..., keys] += block_query[..., :-2].mT @ grad_scores
        grad_value[..., keys] += block_grad[..., :-2].mT @ probs
    grad_key, grad_value = (x[..., :num_keys].mT.to(query.dtype) for x in (grad_key, grad_value))
    return grad_query.flatten(1, 2).to(query.dtype), grad_key, grad_value


def _blocks(num_rows: int, num_keys: int, groups: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and keys of each backward block. Together the blocks pair every row with all keys that it sees."""
    if is_causal:
        yield from (
            (slice(first, first + BLOCK_ROWS), slice(first + BLOCK_ROWS)) for first in range(0, num_rows, BLOCK_ROWS)
        )
        return
    block_rows = max(1, BACKWARD_ROWS // groups)
    for first_key in range(0, num_keys, BLOCK_KEYS):
        for first in range(0, num_rows, block_rows):
            yield slice(first, first + block_rows), slice(first_key, first_key + BLOCK_KEYS)


def _padded(x: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Returns keys or values as a contiguous tensor, padded in causal segments with zeros that no query sees."""
    return (F.pad(x, (0, 0, 0, -x.shape[2] % KEY_MULTIPLE)) if is_causal else x).contiguous()


def _causal_mask(scores: torch.Tensor, groups: int, first: int) -> torch.Tensor:
    """Returns the mask [rows, keys] of a block that starts at row `first`: 0 for keys that a row sees, else -inf."""
    return scores.new_full((scores.shape[2] // groups, scores.shape[3]), -torch.inf).triu(first + 1)


def _flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Flatten [segments, kv heads, rows, ...] to [all rows, ...] for a compiled function.

    With a view, torch.compile would also specialise on the shape of the viewed tensor, and recompile for every shape.
    """
    return torch.ops.aten._unsafe_view(x.contiguous(), [x.shape[:3].numel(), *x.shape[3:]])


def _with_subtracted(x: torch.Tensor, subtracted: torch.Tensor) -> torch.Tensor:
    """Append two columns that, in a product with `_with_ones`, subtract a value per row [..., head_dim + 2].

    The value is split into two values of x's dtype, the second of which is the rounding error of the first. This
    function is not fused, because the compiler would optimize that rounding away.
    """
    high = (-subtracted).to(x.dtype)
    low = (-subtracted - high).to(x.dtype)
    return torch.cat([x, high[..., None], low[..., None]], -1)


def _with_ones(x: torch.Tensor) -> torch.Tensor:
    """Append two columns of ones [..., head_dim + 2]."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 2)], -1)


@fused
def _row_max(scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """Returns the maximum of each row of raw scores f32[all rows]; for the other arguments, see `_probs`."""
    return _masked(scores, mask, num_heads).amax(-1)


@fused
def _probs(
    scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the probabilities in the dtype of scores, and each row's sum of exponentials in fp32.

    More sums in this function would evict rows from the cache: see `mtptrain.training.teacher._softmax`.

    Args:
        scores: raw scores minus the approximate maximum of their row [all rows, keys].
        mask: mask of one head [rows, keys], the same for all heads.
        num_heads: number of heads of all segments together.
        scale: factor of the scores.
    """
    exps = (_masked(scores, mask, num_heads) * scale).exp()
    total = exps.sum(-1, keepdim=True)
    return (exps / total).to(scores.dtype), total[:, 0]


@fused
def _row_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the dot product of each row of x and y in fp32, [..., head_dim] -> [...]."""
    return (x.float() * y.float()).sum(-1)


@fused
def _score_grads(
    scores: torch.Tensor,
    grad_probs: torch.Tensor,
    log_total: torch.Tensor,
    mask: torch.Tensor | None,
    num_heads: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the probabilities, and the gradients of the raw scores.

    Args:
        scores: raw scores minus the approximate maximum of their row [all rows, keys].
        grad_probs: gradients of probabilities minus rowsum(dO * O) [all rows, keys].
        log_total: lse minus the scaled row maximum f32[all rows].
        mask: see `_probs`.
        num_heads: see `_probs`.
        scale: factor of the scores.
    """
    probs = (_masked(scores, mask, num_heads) * scale - log_total[:, None]).exp()
    return probs.to(scores.dtype), (probs * grad_probs.float() * scale).to(scores.dtype)


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """Returns scores plus mask in fp32. `training.loss_blocks._rows_and_grad` says why `num_heads` is passed."""
    wide = scores.float()
    return wide if mask is None else wide + mask.expand(num_heads, -1, -1).reshape(wide.shape)
