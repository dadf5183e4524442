"""Tests that the decoding benchmark runs and writes all its figures. Speed is not tested."""

import json
from pathlib import Path

import pytest

from eval.bench.decode import check, describe, recommended
from mtptrain.decoding.round_costs import Spent
from mtptrain.decoding.speculate import Generation
from tests.conftest import run_program
from tests.test_recipes import make_config


def test_every_batch_size_and_depth_is_measured_and_written(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    run_dir, overrides = fresh_run
    trained = run_program(
        "mtptrain.train", *overrides, "train.max_steps=2", "train.warmup_steps=1", "train.validation_prompts=0"
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    sizes = ("bench.batch_sizes=[1,3]", "bench.draft_depths=[1,4]", "bench.decode_prompts=3", "bench.repeats=1")
    result = run_program("eval.bench.decode", *overrides, *sizes, f"bench.out={tmp_path}/decode.json")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [(row["batch_size"], row["num_speculative_tokens"]) for row in rows] == [
        (b, k) for b in (1, 3) for k in (0, 1, 4)
    ]
    assert all(row["tokens_per_s"] > 0 and row["verify_ms"] > 0 for row in rows)
    assert all(row["speed_up"] == 1.0 for row in rows if row["num_speculative_tokens"] == 0)
    assert rows[0]["tokens_per_round"] == 1.0 and rows[3]["tokens_per_round"] == 3.0
    assert json.loads((run_dir / "bench_decode/report.json").read_text())["rows"] == rows
    assert "<svg" in (run_dir / "bench_decode/report.svg").read_text()
    too_many = run_program("eval.bench.decode", *overrides, "bench.batch_sizes=[1,3]", "bench.decode_prompts=2")
    assert "bench.batch_sizes: must be at most 2, the number of prompts in the smaller half" in too_many.stderr


def answer(rounds: int, *accepted_at: int) -> Generation:
    return Generation([0] * 101, rounds, 0, rounds * len(accepted_at), list(accepted_at))


def test_the_prediction_uses_the_cost_of_random_rounds_and_the_acceptance_on_other_prompts() -> None:
    measured = {
        0: Spent(100, 100, (answer(100),), {"prompt": 5.0, "verify": 1.0}),  # 100 tokens/s
        2: Spent(100, 40, (answer(25, 20, 20),), {"draft": 0.1, "verify": 0.4}),  # 200 tokens/s
    }
    costs = {
        0: Spent(7, 10, (), {"prompt": 7.0, "verify": 0.2}),
        2: Spent(7, 10, (), {"draft": 0.1, "verify": 0.15}),
    }  # a round takes 20 ms without drafts and 25 ms with two
    others = [[answer(50, 50, 25, 5)], [answer(50, 25, 0, 0)]]  # 2.5 and 1.5 tokens a round with two drafts
    row = describe(1, 2, measured, costs, others)
    assert row["speed_up"] == pytest.approx(2.0)
    assert row["predicted_speed_up"] == pytest.approx(200 / (100.8 / 2.5 + (100 + 1 / 3) / 1.5) * 20 / 25)
    assert row["speed_up_with_prompt"] == pytest.approx(6 / 0.5)
    # A round takes 12.5 ms for 4 tokens with drafts, and 10 ms for one token without drafts.
    assert row["refilled_speed_up"] == pytest.approx(4 * 10 / 12.5)
    assert (
        row["tokens_per_round"] == 2.5
        and row["draft_ms"] == pytest.approx(2.5)
        and row["verify_ms"] == pytest.approx(10.0)
    )
    assert recommended([describe(1, 0, measured, costs, others), row], 1) == 2
    both = describe(2, 2, measured, costs, [[*others[0], *others[1]]])
    assert both["predicted_speed_up"] == pytest.approx(
        150 / (100 + 1 / 3) * 20 / 25
    )  # a batch waits for its slowest answer


def test_a_block_drafter_is_measured_only_with_the_number_of_drafts_that_it_was_trained_for() -> None:
    check(make_config("head=dflash", "head.ttt_steps=3", "bench.draft_depths=[3]"))
    with pytest.raises(ValueError, match=r"bench\.draft_depths: must equal head\.ttt_steps=3 .* but is 2;"):
        check(make_config("head=dflash", "head.ttt_steps=3", "bench.draft_depths=[3,2]"))
