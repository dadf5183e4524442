"""The bench of decoding runs to its end and fills its file; what it says of speed is not asserted."""

import json
from pathlib import Path

import pytest

from eval.bench_decode import Spent, describe, recommended
from tests.conftest import run_program


def test_every_batch_size_and_depth_is_measured_and_written(fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    _, overrides = fresh_run
    trained = run_program("mtptrain.train", *overrides, "train.max_steps=2", "train.warmup_steps=1", "train.validation_prompts=0")
    assert trained.returncode == 0, trained.stderr[-3000:]
    sizes = ("bench.batch_sizes=[1,3]", "bench.draft_depths=[1,4]", "bench.decode_prompts=3", "bench.repeats=1")
    result = run_program("eval.bench_decode", *overrides, *sizes, f"bench.out={tmp_path}/decode.json")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["batch_size"], row["num_speculative_tokens"]) for row in rows] == [(b, k) for b in (1, 3) for k in (0, 1, 4)]
    assert all(row["tokens_per_s"] > 0 and row["verify_ms"] > 0 for row in rows)
    assert all(row["speed_up"] == 1.0 for row in rows if row["num_speculative_tokens"] == 0)
    assert rows[0]["tokens_per_round"] == 1.0 and rows[3]["tokens_per_round"] == 3.0
    assert "<svg" in (tmp_path / "decode.svg").read_text()


def test_the_prediction_is_tokens_and_seconds_of_a_round_on_other_prompts() -> None:
    best = {
        (0, 0): Spent(100, 100, 100, {"prompt": 5.0, "verify": 1.0}),  # 100 tokens/s
        (0, 3): Spent(100, 40, 25, {"draft": 0.1, "verify": 0.4}),  # 200 tokens/s
        (1, 0): Spent(100, 100, 100, {"prompt": 7.0, "verify": 2.0}),  # 20 ms a token
        (1, 3): Spent(120, 40, 40, {"draft": 0.2, "verify": 0.8}),  # 3 tokens in 25 ms
    }
    row = describe(1, 3, best)
    assert row["speed_up"] == pytest.approx(2.0) and row["predicted_speed_up"] == pytest.approx(3 * 20 / 25)
    assert row["refilled_speed_up"] == pytest.approx(4 * 10 / 12.5)  # 4 tokens in 12.5 ms, beside one in 10 ms
    assert row["tokens_per_round"] == 2.5 and row["draft_ms"] == pytest.approx(2.5) and row["verify_ms"] == pytest.approx(10.0)
    assert recommended([describe(1, 0, best), row], 1) == 3
