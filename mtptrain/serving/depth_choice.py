"""Uses measured speeds to choose how many tokens to draft, and expresses the choice as engine settings."""

import math
from collections.abc import Mapping
from typing import Any

DYNAMIC_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "ngram")
"""Methods of vLLM 0.32 that can draft a different number of tokens in each batch. Others, such as `medusa`, cannot."""
ADAPTIVE_ALGORITHMS = ("EAGLE", "EAGLE3")
"""Values of SGLang's `--speculative-algorithm` that can vary the number of drafted tokens.

Source: `adaptive_unsupported_reason` in adaptive_spec_params.py.
"""

Speeds = Mapping[int, Mapping[int, float]]
"""Output tokens/s by concurrency and K; K = 0 is the server without drafts."""


def best_num_drafts(speeds: Speeds) -> dict[int, int]:
    """Returns the fastest K at each concurrency. If several are equally fast, the smallest is chosen."""
    return {
        concurrency: max(sorted(tokens_per_s), key=lambda num_drafts: tokens_per_s[num_drafts])
        for concurrency, tokens_per_s in sorted(speeds.items())
    }


def best_fixed_num_drafts(speeds: Speeds) -> int:
    """Returns the K above 0 with the largest geometric mean of tokens/s over all concurrencies."""
    choices = sorted({num_drafts for tokens_per_s in speeds.values() for num_drafts in tokens_per_s if num_drafts})
    return max(choices, key=lambda choice: sum(math.log(tokens_per_s[choice]) for tokens_per_s in speeds.values()))


def per_batch_size(best: Mapping[int, int]) -> list[list[int]]:
    """Returns vLLM's `num_speculative_tokens_per_batch_size`: ranges `[first, last, K]`, both sizes included.

    The measured batch sizes are the concurrencies in `best`. Sizes between two of them get the K of the smaller one,
    which is also how vLLM fills gaps. The first range starts at 1, as vLLM requires, and vLLM extends the last one.
    Adjacent ranges with the same K are merged.
    """
    sizes = sorted(best)
    ranges: list[list[int]] = []
    for size, first, following in zip(sizes, [1, *sizes[1:]], [*sizes[1:], sizes[-1] + 1], strict=True):
        if ranges and ranges[-1][2] == best[size]:
            ranges[-1][1] = following - 1
        else:
            ranges.append([first, following - 1, best[size]])
    return ranges


def adaptive_steps(best: Mapping[int, int]) -> dict[str, dict[str, list[int]]]:
    """Returns the contents of SGLang's `--speculative-adaptive-config`: one candidate at each measured batch size.

    For each batch, SGLang uses the entry of the closest size.
    """
    return {str(size): {"candidate_steps": [num_drafts]} for size, num_drafts in sorted(best.items())}


def why_fixed(method: str, speculative_settings: Mapping[str, Any]) -> str | None:
    """Returns why vLLM must draft the same number of tokens in every batch; None if the number can vary."""
    if speculative_settings.get("parallel_drafting"):
        return "vLLM fixes the number of mask tokens of a parallel drafter when it starts"
    return None if method in DYNAMIC_METHODS else f"vLLM's method {method} drafts a fixed number of tokens"
