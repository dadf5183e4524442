"""Tests `mtptrain serving-check` and `mtptrain serving-bench` with each engine that they start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader

from mtptrain.engines.llama_cpp.server import HOST_SAMPLING
from tests.conftest import Run, run_program, succeed
from tests.sealed import describe_again
from tests.serving.llama_cpp import convert
from tests.serving.ours import OnDisk

ENGINES = [pytest.param("vllm", marks=pytest.mark.slow), "llama_cpp", "openvino", "mlx"]
IN_README = {
    "vllm": "vllm serve ",
    "llama_cpp": f"--spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-p-min 0 {HOST_SAMPLING}",
    "openvino": 'model.set_rt_info([0, 1, 2], "hidden_layers_list")',
    "mlx": "--num-draft-tokens 3",
}
RULES = {"vllm": "", "llama_cpp": "llama.cpp drafts at most one token less", "openvino": "OpenVINO reports the tokens"}
RULES["mlx"] = "In MLX, accepted drafts behind"


@pytest.mark.parametrize("engine", ENGINES)
def test_serving_check_starts_the_engine(run_of: Callable[[str], Run], tmp_path: Path, engine: str) -> None:
    """Servers are asked with two requests in flight. llama.cpp must then sample drafts as `HOST_SAMPLING` says."""
    run_dir, overrides = run_of(engine)
    several = () if engine in ("openvino", "mlx") else ("serving_check.concurrency=2",)
    result = succeed("serving-check", *overrides, *several, f"serving.output_dir={tmp_path}")
    report = json.loads((tmp_path / "serving_check/report.json").read_text())
    assert report["is_equal"] and report["ours"] == report["theirs"] and report["engine"] == engine
    assert report["ours"]["plain_greedy_answers"] == 12 and report["theirs"]["accepted_at"][0] > 0
    assert (report["ours"]["drafted"] is None) == (engine in ("openvino", "mlx"))
    assert report["other_chat"] == ""
    assert len(report["as_served"]) == (0 if engine == "openvino" else 1 if engine == "vllm" else 2)
    assert report["rule"].startswith(RULES[engine]) and report["rule"][:20] in result.stdout
    assert IN_README[engine] in (run_dir / f"export/{engine}/README.md").read_text()


@pytest.mark.slow
def test_an_engine_that_drafts_worse_for_two_requests_at_once_is_found(
    run_of: Callable[[str], Run], tmp_path: Path
) -> None:
    """By default llama.cpp b11434 samples the drafts of the second request from logits of the first."""
    settings = "serving_check.concurrency=2", f"serving_bench.server_args=[{HOST_SAMPLING.replace('--no-', '--')}]"
    result = run_program("serving-check", *run_of("llama_cpp")[1], *settings, f"serving.output_dir={tmp_path}")
    report = json.loads((tmp_path / "serving_check/report.json").read_text())
    assert result.returncode == 1 and report["theirs"]["plain_greedy_answers"] == 12
    alone, together = report["theirs_alone"]["accepted_at"], report["theirs"]["accepted_at"]
    assert alone == report["ours"]["accepted_at"] and sum(together) < sum(alone)
    assert "so it drafts otherwise for several at once" in result.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_serving_bench_measures_the_engine(run_of: Callable[[str], Run], tmp_path: Path, engine: str) -> None:
    in_flight = (1,) if engine == "mlx" else (1, 2)
    settings = (
        *(f"serving_bench.concurrency={list(in_flight)}", "serving_bench.num_speculative_tokens=[1,3]"),
        *("serving_bench.num_requests=6", "serving_bench.ignore_eos=true"),
    )
    succeed("serving-bench", *run_of(engine)[1], *settings, f"serving.output_dir={tmp_path}")
    rows = json.loads((tmp_path / "serving_bench/report.json").read_text())["rows"]
    assert [(row["num_speculative_tokens"], row["concurrency"]) for row in rows] == [
        (num_drafts, concurrency) for num_drafts in (0, 1, 3) for concurrency in in_flight
    ]
    num_tokens = rows[0]["output_tokens"] // 6
    for row in rows:
        assert (row["requests"], row["output_tokens"]) == (6, 6 * num_tokens) and num_tokens > 20
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert 0 < row[name]["p50"] <= row[name]["p99"] and row[name]["mean"] > 0
        plain = next(each for each in rows if each["concurrency"] == row["concurrency"])
        assert row["speed_up"] == pytest.approx(row["output_tokens_per_s"] / plain["output_tokens_per_s"])
        if (num_drafts := row["num_speculative_tokens"]) == 0:
            assert not row["rounds"] and not row["accepted_at"]
            continue
        # The prompt gives the first token of each answer, except in mlx-lm. The last round may be cut at the end.
        emitted = row["rounds"] + sum(row["accepted_at"]) + (0 if engine == "mlx" else 6)
        assert row["output_tokens"] - 6 <= emitted <= row["output_tokens"] + num_drafts * 6
        assert len(row["accepted_at"]) == num_drafts and 0 < row["accepted_at"][0] < row["rounds"]
    left = {path.name: path.is_dir() for path in (tmp_path / "serving_bench").iterdir()}
    assert "plot.svg" in left and ("vllm.json" in left) == (engine == "vllm")
    assert not any(left.values()), "converted models must be removed"


@pytest.fixture(scope="module")
def quantised(target_of: Callable[[str], OnDisk], llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the setting of a target in q8_0, whose activations llama.cpp quantises too."""
    out = tmp_path_factory.mktemp("quantised") / "q8_0.gguf"
    return f"target.gguf={convert(target_of('llama').directory, out, '--outtype', 'q8_0')}"


@pytest.mark.parametrize("engine", ["llama_cpp", "openvino"])
def test_with_rounded_weights_ours_are_compared_along_the_engines_answers(
    run_of: Callable[[str], Run], request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    is_llama = engine == "llama_cpp"
    rounded = request.getfixturevalue("quantised") if is_llama else "serving.openvino_weights=int8"
    result = run_program("serving-check", *run_of(engine)[1], rounded, f"serving.output_dir={tmp_path}")
    assert result.returncode == 0, (result.stdout, result.stderr[-3000:])
    report = json.loads((tmp_path / "serving_check/report.json").read_text())
    assert report["is_equal"] or "ours are those along the engine's answers" in result.stdout
    if is_llama:
        ours, theirs = report["ours_on_their_answers"], report["theirs"]
        assert abs(ours["accepted_at"][0] - theirs["accepted_at"][0]) <= 0.05 * theirs["rounds"]


def test_a_wrong_head_is_found_with_rounded_weights_too(
    run_of: Callable[[str], Run], quantised: str, tmp_path: Path
) -> None:
    run_dir, overrides = run_of("llama_cpp")
    wrong = shutil.copytree(run_dir / "export/llama_cpp", tmp_path / "wrong")
    tensors = GGUFReader(wrong / "model.gguf", "r+").tensors
    next(tensor for tensor in tensors if tensor.name == "output_norm.weight").data[:] = 0
    describe_again(wrong / "serving.json")
    settings = quantised, f"serving.output_dir={tmp_path / 'check'}", f"serving.head_dir={wrong}"
    result = run_program("serving-check", *overrides, *settings)
    assert result.returncode == 1 and "but they differ in" in result.stderr
