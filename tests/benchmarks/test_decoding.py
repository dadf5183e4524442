"""Tests the benchmark of decoding. Speed is not tested."""

from pathlib import Path

import pytest

from benchmarks.decoding import Spent, describe
from tests.conftest import run_program


@pytest.mark.slow
def test_every_batch_size_and_k_is_measured(fresh_run: tuple[Path, tuple[str, ...]]) -> None:
    _, overrides = fresh_run
    short = ("train.max_steps=2", "train.warmup_steps=1", "train.validation_prompts=0")
    trained = run_program("train", *overrides, *short)
    assert trained.returncode == 0, trained.stderr[-3000:]
    options = ["--batch-sizes", "1", "3", "--drafts", "3", "1", "--repeats", "1", "--prompts"]
    result = run_program("benchmarks.decoding", *overrides, *options, "4")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [
        [str(size), str(prompts), str(k)] for size, prompts in ((1, 4), (3, 3)) for k in (0, 1, 3)
    ]
    assert all(row[4] == "1.00" and row[6] == "1.00" for row in rows if row[2] == "0"), "plain decoding is the unit"
    too_few = run_program("benchmarks.decoding", *overrides, *options, "2")
    assert "--batch-sizes: must be at most 2, the number of prompts, but the largest is 3" in too_few.stderr


def test_speed_ups_are_relative_to_plain_decoding() -> None:
    measured = {
        0: Spent(100, 100, 100, {"verify": 1.0}),  # 100 tokens/s
        2: Spent(100, 40, 25, {"draft": 0.1, "verify": 0.4}),  # 200 tokens/s
    }
    row = describe(2, measured)
    assert row["speed_up"] == pytest.approx(2.0)
    # A round takes 12.5 ms for 4 tokens with drafts, and 10 ms for one token without drafts.
    assert row["refilled_speed_up"] == pytest.approx(4 * 10 / 12.5)
    assert row["tokens_per_own_round"] == 4.0
    assert (row["draft_ms"], row["verify_ms"]) == (pytest.approx(2.5), pytest.approx(10.0))
