"""What is read from a result file of `vllm bench serve`."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtptrain.serving.load_generator import Latencies, Spread, quantile


@pytest.mark.parametrize("number", [1, 2, 5, 100])
def test_quantiles_are_numpys(number: int) -> None:
    values = sorted(np.random.default_rng(number).exponential(size=number).tolist())
    for share in (0.0, 0.5, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_latencies_are_those_of_requests_and_of_messages(tmp_path: Path) -> None:
    result = {
        "completed": 3,
        "total_output_tokens": 12,
        "duration": 4.0,
        "latencies": [1.0, 2.2, 0.3],
        "ttfts": [0.2, 0.2, 0.3],
        "output_lens": [5, 6, 1],
        "itls": [[0.3, 0.5], [1.0, 1.0], []],
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    latencies = Latencies.read(tmp_path / "result.json")
    assert latencies.output_tokens_per_s == 3.0
    assert latencies.ttft_ms.p50 == pytest.approx(200)
    # 0.8 s for 4 tokens after the first, 2 s for 5; an answer of one token has no time between tokens.
    assert latencies.tpot_ms.mean == pytest.approx(300) and latencies.tpot_ms.p50 == pytest.approx(300)
    assert latencies.itl_ms.p50 == pytest.approx(750) and latencies.itl_ms.mean == pytest.approx(700)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)
