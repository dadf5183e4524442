"""Estimates how fast one rank writes its store.

This rate limits extraction if the target is small or the head captures layers.
"""

from mtptrain.config import StoreDtype
from mtptrain.hidden_states.shard_format import AUX_HIDDEN_STATES, HIDDEN_STATES, bytes_per_token, is_fp8

EXACT_VALUES_PER_S = 600e6
"""bf16 values per second that one CPU thread checks, hashes and writes, measured on a cloud CPU."""
FP8_VALUES_PER_S = 180e6
"""Values per second that one CPU thread checks, encodes in eight bits, hashes and writes, on the same CPU."""
SHA256_BYTES_PER_S = 0.75e9
"""Bytes per second hashed by the single thread that finishes shards, on the same CPU."""


def writer_tokens_per_s(hidden_size: int, num_captured: int, dtype: StoreDtype, num_threads: int) -> float:
    """Returns the tokens/s of one rank whose states are on the CPU, as vLLM's are.

    The slower of writing and finishing shards sets the rate. States on a GPU are checked and encoded there; for them
    this is a lower bound.

    Args:
        hidden_size: H.
        num_captured: L.
        dtype: the store's dtype.
        num_threads: `hidden_states.writer_threads`, at most the CPU cores of the rank.
    """
    seconds = sum(
        count * hidden_size / (FP8_VALUES_PER_S if is_fp8(dtype, name) else EXACT_VALUES_PER_S)
        for name, count in ((HIDDEN_STATES, 1), (AUX_HIDDEN_STATES, num_captured))
    )
    return min(num_threads / seconds, SHA256_BYTES_PER_S / bytes_per_token(hidden_size, num_captured, dtype))
