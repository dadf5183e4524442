"""Tests the benchmark of decoding. Speed is not tested."""

import json
from pathlib import Path

import pytest

from benchmarks.decoding import describe
from mtptrain.decoding.round_costs import Spent
from tests.conftest import run_program


@pytest.mark.slow
def test_every_batch_size_and_k_is_measured_and_written(fresh_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = fresh_run
    short = ("train.max_steps=2", "train.warmup_steps=1", "train.validation_prompts=0")
    trained = run_program("train", *overrides, *short)
    assert trained.returncode == 0, trained.stderr[-3000:]
    options = ["--batch-sizes", "1", "3", "--drafts", "3", "1", "--repeats", "1", "--prompts"]
    result = run_program("benchmarks.decoding", *overrides, *options, "4")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((run_dir / "bench_decode/report.json").read_text())
    rows = report["rows"]
    assert report["command"].endswith("--batch-sizes 1 3 --drafts 3 1 --repeats 1 --prompts 4")
    assert [(row["batch_size"], row["num_prompts"], row["num_speculative_tokens"]) for row in rows] == [
        (size, prompts, k) for size, prompts in ((1, 4), (3, 3)) for k in (0, 1, 3)
    ]
    assert all(row["tokens_per_s"] > 0 and row["verify_ms"] > 0 for row in rows)
    assert all(row["speed_up"] == 1.0 for row in rows if row["num_speculative_tokens"] == 0)
    assert rows[0]["tokens_per_own_round"] == 1.0 and "Fastest here: K = " in result.stdout
    too_few = run_program("benchmarks.decoding", *overrides, *options, "2")
    assert "--batch-sizes: must be at most 2, the number of prompts, but the largest is 3" in too_few.stderr
    block = run_program("benchmarks.decoding", *overrides, *options, "4", "head=dflash", "head.ttt_steps=3")
    assert "--drafts: must equal head.ttt_steps=3 with head dflash" in block.stderr


def test_speed_ups_are_relative_to_plain_decoding() -> None:
    measured = {
        0: Spent(100, 100, 100, {"prompt": 5.0, "verify": 1.0}),  # 100 tokens/s
        2: Spent(100, 40, 25, {"draft": 0.1, "verify": 0.4}),  # 200 tokens/s
    }
    row = describe(2, measured)
    assert row["speed_up"] == pytest.approx(2.0)
    assert row["speed_up_with_prompt"] == pytest.approx(6 / 0.5)
    # A round takes 12.5 ms for 4 tokens with drafts, and 10 ms for one token without drafts.
    assert row["refilled_speed_up"] == pytest.approx(4 * 10 / 12.5)
    assert row["tokens_per_own_round"] == 4.0
    assert (row["draft_ms"], row["verify_ms"]) == (pytest.approx(2.5), pytest.approx(10.0))
