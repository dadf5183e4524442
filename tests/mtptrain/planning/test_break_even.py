"""Tests the arithmetic of the break-even acceptance length, its verdicts, and what a stored measurement is used for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.serving_speed.bench import Row
from mtptrain.config import PipelineConfig
from mtptrain.engines.requests import Answer, EngineCounts, LoadResult
from mtptrain.planning.break_even import (
    OWN_LOOP,
    RoundCost,
    break_even_dir,
    default_choices,
    predicted_speed_up,
    read_costs,
    subject,
    usual_length,
    verdict,
    verdicts,
)
from mtptrain.planning.plan import describe_break_even
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import resolve_target
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_config, make_target
from tests.gguf_files import write_gguf
from tests.sealed import seal_again


def cost(depths: int, round_ms: float, plain_ms: float = 10.0, batch_size: int = 1, engine: str = "vllm") -> RoundCost:
    return RoundCost(engine, batch_size, depths, plain_ms, round_ms, None, None)


def test_a_text_takes_equally_long_with_and_without_drafts_at_the_break_even_length() -> None:
    """Counts the milliseconds of a text of 1,000 tokens, with rounds that accept this share of their drafts."""
    for depths, round_ms, accepted in ((1, 15.0, 0.5), (3, 22.0, 0.4), (5, 60.0, 1.0)):
        num_rounds = 1000 / (1 + accepted * depths)
        assert num_rounds * round_ms == pytest.approx(1000 * 10.0), "the case must break even"
        assert cost(depths, round_ms).break_even_length == pytest.approx(1 + accepted * depths)
        assert cost(depths, round_ms).break_even_rate == pytest.approx(accepted)
        assert cost(depths, round_ms).can_pay is (accepted < 1)


def test_the_usual_lengths_are_those_of_drafts_that_are_accepted_until_the_first_rejection_and_published_ones() -> None:
    for depths, rate, bound in ((1, 0.69, 0), (3, 0.69, 0), (7, 0.79, 1)):
        # A round gives k + 1 tokens if exactly k drafts are accepted before the first rejection.
        expected = sum((k + 1) * rate**k * (1 - rate) for k in range(depths)) + (depths + 1) * rate**depths
        usual = usual_length("eagle3", depths)
        assert usual is not None and usual[bound] == pytest.approx(expected)
    assert usual_length("medusa", 3) is None
    for head, depths, published in (
        *(("eagle3", depths, lengths) for depths, lengths in ((3, (2.50, 2.96)), (5, (2.83, 3.62)), (7, (2.98, 3.98)))),
        ("mtp", 7, (2.90, 4.00)),
        ("dflash", 7, (3.11, 3.28)),
    ):
        assert usual_length(head, depths) == pytest.approx(published, rel=0.03)


def test_the_verdict_names_the_k_that_is_fastest_at_the_usual_lengths_or_says_that_none_pays() -> None:
    # In the middle of the usual lengths, K = 1 gives 1.73 / 1.6 = 1.08, K = 2 gives 2.27 / 1.8 = 1.26, K = 3 0.99.
    costs = [cost(1, 16.0), cost(2, 18.0), cost(3, 27.0)]
    said = verdict(costs, "mtp")
    assert said == (
        "K = 2 pays above 1.80 tokens per round; mtp heads usually reach 2.1 to 2.4, 1.18 to 1.34 times plain decoding"
    )
    assert verdict(costs, "medusa") == (
        "K = 2 pays above 1.80 tokens per round, that is, if more than 40% of the drafts are accepted"
    )
    assert verdict([cost(1, 21.0), cost(2, 40.0)], "mtp") == (
        "no K can pay: a round with K = 1 costs 2.10 plain steps and gives at most 2 tokens"
    )
    assert verdict([cost(1, 19.5)], "mtp") == (
        "K = 1 pays above 1.95 tokens per round, but mtp heads usually reach 1.7 to 1.8: drafting does not pay"
    )
    assert [line.partition(":")[0] for line in verdicts([cost(1, 15.0), cost(1, 15.0, batch_size=2)], "mtp")] == [
        "vllm, batch 1",
        "vllm, batch 2",
    ]


def test_default_choices_are_those_that_the_head_can_draft() -> None:
    depths = {
        head: default_choices(make_config(f"head={head}", "head.ttt_steps=3").head)
        for head in ("mtp", "peagle", "dflash")
    }
    assert depths == {"mtp": [1, 2, 3, 5], "peagle": [1, 2, 3], "dflash": [3]}


def test_a_speed_up_is_predicted_from_the_cost_of_the_same_engine_batch_and_k() -> None:
    costs = [cost(1, 15.0), cost(3, 25.0), cost(3, 30.0, batch_size=8), cost(3, 50.0, engine=OWN_LOOP)]
    assert predicted_speed_up(costs, "vllm", 1, 3, 3.0) == pytest.approx(1.2)
    assert predicted_speed_up(costs, "vllm", 8, 3, 3.0) == pytest.approx(1.0)
    assert predicted_speed_up(costs, OWN_LOOP, 1, 3, 3.0) == pytest.approx(0.6)
    assert predicted_speed_up(costs, "vllm", 2, 3, 3.0) is None and predicted_speed_up([], "vllm", 1, 3, 3.0) is None
    row = Row.of(3, 8, LoadResult([Answer([1.0], 1)], 1.0, EngineCounts(10, 30, [9, 6, 3])))
    described = row.describe({8: {0: 1.0}}, "vllm", costs)
    assert described["predicted_speed_up"] == pytest.approx((1 + 18 / 10) / 3)


def store(config: PipelineConfig, target: TargetFiles) -> Path:
    path = break_even_dir(config) / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [cost(3, 25.0).describe(config.head.name)]
    write_sealed(path, {"subject": subject(config, target), "rows": rows})
    return path


def test_costs_are_used_only_for_the_same_weights_head_and_types_of_weights(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, tmp_path: Path
) -> None:
    config = config_for()
    assert read_costs(config, TargetFiles(tiny_target)) == []
    store(config, TargetFiles(tiny_target))
    assert read_costs(config, TargetFiles(tiny_target)) == [cost(3, 25.0)]
    assert read_costs(config_for("head.start_from_target=true"), TargetFiles(tiny_target)) == [cost(3, 25.0)]
    assert read_costs(config_for("acceptance.dtype=bfloat16"), TargetFiles(tiny_target)) == []
    assert read_costs(config_for("head.intermediate_size=64"), TargetFiles(tiny_target)) == []
    assert read_costs(config_for("head=eagle"), TargetFiles(tiny_target)) == []
    for engine in ("serving.engine=llama_cpp", "serving.engine=openvino"):
        assert read_costs(config_for(engine), TargetFiles(tiny_target)) == []
    assert read_costs(config, TargetFiles(make_target(tmp_path / "other", seed=1))) == []
    (tmp_path / "only_config").mkdir()
    assert read_costs(config, TargetFiles(tmp_path / "only_config")) == []
    for engine, other in (("llama_cpp", "export.dtype=q8_0"), ("openvino", "serving.openvino_weights=int8")):
        settings = f"serving.engine={engine}", f"export.engine={engine}"
        store(config_for(*settings), TargetFiles(tiny_target))
        assert read_costs(config_for(*settings), TargetFiles(tiny_target)) == [cost(3, 25.0)]
        assert read_costs(config_for(*settings, other), TargetFiles(tiny_target)) == []


def test_a_plan_quotes_costs_that_llama_cpp_had_with_a_gguf_file(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    file = str(write_gguf(tmp_path / "tiny.gguf", tiny_target))
    llama_cpp = ("serving.engine=llama_cpp", "export.engine=llama_cpp", "head=eagle3")
    for given, target in (
        (f"target.path={file}", TargetFiles(resolve_target(file), file)),
        (f"target.gguf={file}", TargetFiles(tiny_target, given_gguf=file)),
    ):
        config = config_for(*llama_cpp, given, f"run_dir={tmp_path}/{given.partition('=')[0]}")
        assert describe_break_even(config).startswith("not measured; mtptrain serving-bench")
        store(config, target)
        assert describe_break_even(config).startswith("vllm, batch 1: K = 3 pays above 2.50 tokens per round")


def test_a_damaged_measurement_is_refused(config_for: Callable[..., PipelineConfig], tiny_target: Path) -> None:
    config = config_for()
    path = store(config, TargetFiles(tiny_target))
    rows = json.loads(path.read_text())["rows"]
    del rows[0]["plain_ms"]
    seal_again(path, rows=rows)
    with pytest.raises(
        ValueError, match=r"report.json: must have all figures of every row, .*'plain_ms'.*; run mtptrain"
    ):
        read_costs(config, TargetFiles(tiny_target))
    path.write_text(path.read_text().replace("25.0", "2.5"))
    with pytest.raises(UserError, match=r"report.json: must be as mtptrain wrote it, but was changed .*; run mtptrain"):
        read_costs(config, TargetFiles(tiny_target))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"report.json: must have the entries subject, rows, but lacks rows; run mtp"):
        read_costs(config, TargetFiles(tiny_target))
