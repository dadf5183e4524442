"""Tests how many tokens per second the plan expects one rank to write."""

import pytest

from mtptrain.config import StoreDtype
from mtptrain.planning.writing import FP8_VALUES_PER_S, SHA256_BYTES_PER_S, writer_tokens_per_s


def test_threads_bound_the_writer_until_finishing_shards_does() -> None:
    one, two, many = (writer_tokens_per_s(4096, 3, StoreDtype.fp8, threads) for threads in (1, 2, 64))
    assert one == pytest.approx(FP8_VALUES_PER_S / (4 * 4096)) and two == 2 * one
    assert many == SHA256_BYTES_PER_S / (4 * (4096 + 4) + 5)


def test_the_last_layer_in_bf16_costs_disk_and_saves_encoding() -> None:
    def rate(dtype: StoreDtype) -> float:
        return writer_tokens_per_s(4096, 3, dtype, 1)

    assert rate(StoreDtype.fp8) < rate(StoreDtype.fp8_aux) < rate(StoreDtype.bfloat16)
