"""Estimates how fast one rank writes hidden states to the store.

This rate may limit extraction if the target is small or the head captures layers.
"""

from mtptrain.config import StoreDtype
from mtptrain.hidden_states.shard_format import AUX_HIDDEN_STATES, HIDDEN_STATES, bytes_per_token, is_fp8

EXACT_VALUES_PER_S = 600e6
"""Number of bf16 values per second that one CPU thread checks, hashes and writes, measured on a cloud CPU."""
FP8_VALUES_PER_S = 180e6
"""Number of values per second that a thread checks, encodes in eight bits, hashes and writes, on the same CPU."""
SHA256_BYTES_PER_S = 0.75e9
"""Bytes per second hashed by the single thread that finishes shards, on the same CPU."""


def writer_tokens_per_s(hidden_size: int, num_captured: int, dtype: StoreDtype, num_threads: int) -> float:
    """Returns the tokens/s that one rank writes if its states are on the CPU, as with vLLM.

    The slower of writing and finishing shards sets the rate. States on a GPU are checked and encoded there, so the
    result is a lower bound for them.

    Args:
        hidden_size: H.
        num_captured: L.
        dtype: the store's dtype.
        num_threads: `hidden_states.writer_threads`. The estimate assumes that each rank has that many CPU cores.
    """
    seconds = sum(
        count * hidden_size / (FP8_VALUES_PER_S if is_fp8(dtype, name) else EXACT_VALUES_PER_S)
        for name, count in ((HIDDEN_STATES, 1), (AUX_HIDDEN_STATES, num_captured))
    )
    return min(num_threads / seconds, SHA256_BYTES_PER_S / bytes_per_token(hidden_size, num_captured, dtype))
