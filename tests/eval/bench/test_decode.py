"""Tests that the decoding benchmark runs and writes all its figures. Speed is not tested."""

import json
from pathlib import Path

import pytest

from eval.bench.decode import check, describe, recommended
from mtptrain.decoding.round_costs import Spent
from tests.conftest import run_program
from tests.test_recipes import make_config


def test_every_batch_size_and_depth_is_measured_and_written(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    run_dir, overrides = fresh_run
    trained = run_program(
        "train", *overrides, "train.max_steps=2", "train.warmup_steps=1", "train.validation_prompts=0"
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    sizes = ("bench.batch_sizes=[1,3]", "bench.draft_depths=[4,1]", "bench.decode_prompts=4", "bench.repeats=1")
    result = run_program("eval.bench.decode", *overrides, *sizes, f"bench.out={tmp_path}/decode.json")
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((tmp_path / "decode.json").read_text())
    rows = figures["rows"]
    assert figures["bench"] == "decode"
    assert [(row["batch_size"], row["num_prompts"], row["num_speculative_tokens"]) for row in rows] == [
        (size, prompts, k) for size, prompts in ((1, 4), (3, 3)) for k in (0, 1, 4)
    ]
    assert all(row["tokens_per_s"] > 0 and row["verify_ms"] > 0 for row in rows)
    assert all(row["speed_up"] == 1.0 for row in rows if row["num_speculative_tokens"] == 0)
    assert rows[0]["tokens_per_own_round"] == 1.0 and rows[3]["tokens_per_own_round"] == 1.0
    assert json.loads((run_dir / "bench_decode/report.json").read_text())["rows"] == rows
    assert "<svg" in (run_dir / "bench_decode/report.svg").read_text()
    too_many = run_program("eval.bench.decode", *overrides, "bench.batch_sizes=[1,3]", "bench.decode_prompts=2")
    assert "bench.batch_sizes: must be at most 2, the number of prompts, but the largest is 3" in too_many.stderr
    assert "acceptance.num_prompts, or add lines to acceptance.prompts_file" in too_many.stderr


def test_speed_ups_are_relative_to_plain_decoding() -> None:
    measured = {
        0: Spent(100, 100, 100, {"prompt": 5.0, "verify": 1.0}),  # 100 tokens/s
        2: Spent(100, 40, 25, {"draft": 0.1, "verify": 0.4}),  # 200 tokens/s
    }
    row = describe(1, 2, measured)
    assert row["speed_up"] == pytest.approx(2.0)
    assert row["speed_up_with_prompt"] == pytest.approx(6 / 0.5)
    # A round takes 12.5 ms for 4 tokens with drafts, and 10 ms for one token without drafts.
    assert row["refilled_speed_up"] == pytest.approx(4 * 10 / 12.5)
    assert row["tokens_per_own_round"] == 4.0
    assert (row["draft_ms"], row["verify_ms"]) == (pytest.approx(2.5), pytest.approx(10.0))
    assert recommended([describe(1, 0, measured), row], 1) == 2


def test_a_block_drafter_is_measured_only_with_the_number_of_drafts_that_it_was_trained_for() -> None:
    check(make_config("head=dflash", "head.ttt_steps=3", "bench.draft_depths=[3]"))
    with pytest.raises(ValueError, match=r"bench\.draft_depths: must equal head\.ttt_steps=3 .* but is 2;"):
        check(make_config("head=dflash", "head.ttt_steps=3", "bench.draft_depths=[3,2]"))
