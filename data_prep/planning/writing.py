"""How many tokens a second one rank writes to its store: a bound of extraction where the target is small or the heads capture layers."""

from mtptrain.config import StoreDtype
from mtptrain.shard_format import AUX_HIDDEN_STATES, HIDDEN_STATES, bytes_per_token, is_fp8

EXACT_VALUES_PER_S = 600e6
"""bf16 values that one CPU thread checks, hashes and writes, measured on a cloud CPU."""
FP8_VALUES_PER_S = 180e6
"""Values that one CPU thread checks, encodes in eight bits, hashes and writes, measured there too."""
SHA256_BYTES_PER_S = 0.75e9
"""Bytes that the thread which finishes shards hashes, one shard at a time, measured there too."""


def writer_tokens_per_s(hidden_size: int, num_captured: int, dtype: StoreDtype, num_threads: int) -> float:
    """Returns the tokens/s of one rank whose states are on the CPU, as vLLM's are: the slower of writing and finishing shards.

    States on a GPU are checked and encoded there, so that this is a lower bound for them.

    Args:
        hidden_size: H.
        num_captured: L.
        dtype: of the store.
        num_threads: `hidden_states.writer_threads`, at most the CPU cores of the rank.
    """
    seconds = sum(
        count * hidden_size / (FP8_VALUES_PER_S if is_fp8(dtype, name) else EXACT_VALUES_PER_S)
        for name, count in ((HIDDEN_STATES, 1), (AUX_HIDDEN_STATES, num_captured))
    )
    return min(num_threads / seconds, SHA256_BYTES_PER_S / bytes_per_token(hidden_size, num_captured, dtype))
