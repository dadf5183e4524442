"""Tests that `serving_bench.break_even` measures our own loop without an engine, and refuses bad input before that."""

import json
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.serving_speed import break_even_measurement
from eval.serving_speed.bench import Row
from eval.serving_speed.break_even_measurement import costs_of_rows, loop_cost, measure_break_even, warn_of_impossible
from mtptrain.decoding.round_costs import Spent
from mtptrain.engines.requests import Answer, LoadResult
from mtptrain.planning.break_even import RoundCost
from mtptrain.stage_dir import StageDir
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, run_program

BREAK_EVEN = ("serving_bench.break_even=true", "acceptance.prompt_tokens=16", "serving_bench.concurrency=[1,3]")


def test_our_own_loop_is_measured_without_prompts_export_or_engine_and_the_plan_quotes_it(
    tiny_target: Path, tmp_path: Path
) -> None:
    settings = [f"target.path={tiny_target}", f"run_dir={tmp_path}/run", "head=hydra", "head.ttt_steps=3", *BREAK_EVEN]
    before = run_program("plan", *settings)
    assert "mtptrain serving-bench recipe=quickstart" in " ".join(before.stdout.replace("│", " ").split())
    result = run_program("serving-bench", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    directory = tmp_path / "run/serving_bench/break_even"
    report = json.loads((directory / "report.json").read_text())
    rows = report["rows"]
    assert [(row["batch_size"], row["num_speculative_tokens"]) for row in rows] == [
        (b, k) for b in (1, 3) for k in (1, 2, 3)
    ]
    for row in rows:
        assert row["engine"] == "mtptrain" and row["usual_length"] is None
        assert row["break_even_length"] == pytest.approx(row["round_ms"] / row["plain_ms"])
        assert 0 < row["draft_ms"] + row["verify_ms"] < row["round_ms"]
        assert f"{row['break_even_length']:.2f}" in result.stdout
    assert (report["prompt_tokens"], report["new_tokens"]) == (16, 33)
    assert "vllm was not measured: head: must be one of" in result.stdout, "no engine has a class for hydra"
    assert "mtptrain, batch 3: " in result.stdout
    assert "<svg" in (directory / "plot.svg").read_text() and (directory / "stage.json").is_file()
    after = run_program("plan", *settings)
    assert "mtptrain, batch 1: " in after.stdout and "not measured" not in after.stdout


def test_nothing_holds_the_target_of_our_loop_when_the_gpu_gives_its_memory_back(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings, is_freed = [], []

    def load(*args: Any) -> Target:
        target = load_target(*args)
        embeddings.append(weakref.ref(target.parts.embed_tokens))
        return target

    monkeypatch.setattr(break_even_measurement, "load_target", load)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: is_freed.append(embeddings[0]() is None))
    overrides = [f"target.path={tiny_target}", "head=medusa", *BREAK_EVEN, "serving_bench.num_speculative_tokens=[1]"]
    measure_break_even(make_config(*overrides, "serving.engine=llama_cpp"), tmp_path)
    assert is_freed == [True]


def test_a_measurement_that_fails_keeps_the_earlier_report_and_its_settings(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("out of memory")

    monkeypatch.setattr(break_even_measurement, "loop_costs", fail)
    config = make_config(f"target.path={tiny_target}", "head=medusa", *BREAK_EVEN)
    StageDir(tmp_path).record(make_config())
    (tmp_path / "report.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="out of memory"):
        measure_break_even(config, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_round_takes_its_phases_divided_by_its_rounds_and_is_compared_with_the_plain_step_of_its_batch() -> None:
    plain = Spent(32, 32, 32, {"prompt": 9.0, "draft": 0.0, "verify": 0.32, "choose": 0.0})
    drafting = Spent(32, 16, 16, {"prompt": 9.0, "draft": 0.16, "verify": 0.24, "choose": 0.08})
    cost = loop_cost(2, 3, {0: plain, 3: drafting})
    assert (cost.plain_ms, cost.draft_ms, cost.verify_ms, cost.round_ms) == pytest.approx((10.0, 10.0, 15.0, 30.0))
    assert (cost.batch_size, cost.num_speculative_tokens, cost.break_even_length) == (2, 3, pytest.approx(3.0))
    steps = {(0, 1): 10.0, (0, 4): 20.0, (3, 1): 25.0, (3, 4): 30.0}
    rows = [Row.of(*key, LoadResult([Answer([1.0, 1.0 + ms], 2)], 1.0, None)) for key, ms in steps.items()]
    costs = costs_of_rows("vllm", rows)
    assert [(cost.batch_size, cost.num_speculative_tokens) for cost in costs] == [(1, 3), (4, 3)]
    assert [cost.break_even_length for cost in costs] == pytest.approx([2.5, 1.5])


def test_a_round_that_is_faster_than_a_plain_step_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match=r"must take at least as long .* vllm, batch 4 and K = 3 takes 5\.00 ms inst"):
        warn_of_impossible([RoundCost("vllm", 4, 3, 10.0, 5.0, None, None)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warn_of_impossible([RoundCost("vllm", 4, 3, 10.0, 10.0, None, None)])


def test_bad_input_is_refused_before_anything_is_measured(tiny_target: Path, tmp_path: Path) -> None:
    for override, message in (
        (
            "acceptance.prompt_tokens=470",
            "must be at most 469, so that 33 new tokens and 2 x 5 drafts fit the target's",
        ),
        (f"serving.python={sys.executable}", f"must be a Python with vLLM, but {sys.executable} has none"),
        ("serving.engine=llama_cpp target.gguf=/none.gguf", "must be an existing GGUF file, but /none.gguf does not"),
        ("head=eagle3", "head.capture_layers: must be different layers in rising order"),
    ):
        config = make_config(f"target.path={tiny_target}", *BREAK_EVEN, *override.split())
        with pytest.raises(UserError) as refused:
            measure_break_even(config, tmp_path)
        assert message in str(refused.value)
    assert not list(tmp_path.iterdir())
