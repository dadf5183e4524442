"""Tests that `mtptrain serving-bench` writes the fastest K for engines, and refuses bad input before it serves."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from eval.loads import Row, fastest, measure, speeds_of, warn_of_unequal_work
from eval.serving_bench import prepare, write_engine_settings, write_results
from mtptrain.engines import server as engine_server
from mtptrain.engines.base import Served
from mtptrain.engines.requests import Answer, LoadResult
from mtptrain.engines.table import running_engine
from mtptrain.run_dir import Run
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, run_program
from tests.mtptrain.engines.fake_server import fake_server

SPEEDS = {
    1: {0: 100.0, 1: 120.0, 3: 150.0},
    2: {0: 180.0, 1: 250.0, 3: 250.0},
    4: {0: 300.0, 1: 330.0, 3: 320.0},
    8: {0: 500.0, 1: 400.0, 3: 300.0},
}
"""The smaller of two equal K is taken."""


def write(
    directory: Path, target_dir: Path, speeds: dict[int, dict[int, float]] = SPEEDS, **facts: Any
) -> tuple[str, dict[str, Any] | None, str]:
    """Write the settings, and return the message, vLLM's settings and the README."""
    directory.mkdir(exist_ok=True)
    target, head_dir = TargetFiles(target_dir, "a/new target"), directory / "export/vllm"
    facts = {"speculative_settings": {}, "holds_target": False, **facts}
    plain = Path("python"), target, ServingConfig(), "float32", 64, 8
    served = Served(*plain, head_dir=head_dir, facts=facts, log_dir=directory)
    said = write_engine_settings(directory, speeds, served, running_engine("vllm"))
    vllm, readme = directory / "vllm.json", directory / "README.md"
    return said, json.loads(vllm.read_text()) if vllm.exists() else None, readme.read_text() if readme.exists() else ""


def test_the_settings_are_files_that_the_readmes_commands_use(tmp_path: Path, tiny_target: Path) -> None:
    said, vllm, readme = write(tmp_path, tiny_target, method="eagle")
    assert vllm == {
        "method": "eagle",
        "model": str(tmp_path / "export/vllm"),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 7, 1], [8, 8, 0]],
    }
    assert f"vllm serve 'a/new target' --speculative-config \"$(cat {tmp_path}/vllm.json)\" --dtype float32\n" in readme
    assert "K = 3 from batch size 1, K = 1 from batch size 2" in readme
    found = "fastest K by requests in flight: 3 at 1, 1 at 2, 1 at 4, 0 at 8"
    assert said == f"{found}; settings and command: {tmp_path}/README.md"


def test_other_heads_get_other_settings_or_none(tmp_path: Path, tiny_target: Path) -> None:
    _, vllm, readme = write(tmp_path / "mimo", tiny_target, method="mtp", holds_target=True)
    assert vllm is not None and "model" not in vllm
    assert f"vllm serve {tmp_path}/mimo/export/vllm --speculative-config" in readme
    parallel: dict[str, Any] = {"method": "eagle3", "speculative_settings": {"parallel_drafting": True}}
    for facts in (parallel, {"method": "medusa"}):
        said, *files = write(tmp_path / "parallel", tiny_target, **facts)
        assert said == "fastest K by requests in flight: 3 at 1, 1 at 2, 1 at 4, 0 at 8" and files == [None, ""]
    said, vllm, readme = write(tmp_path / "plain", tiny_target, speeds={1: {0: 5.0, 3: 4.0}}, method="mtp")
    assert said.startswith("decoding without drafts was the fastest at every concurrency")
    assert vllm is None and readme == ""


def row(depth: int | None, output_tokens: int, duration_s: float = 2.0, concurrency: int = 1) -> Row:
    return Row.of(depth, concurrency, LoadResult([Answer([1.0], output_tokens)], duration_s, None))


def test_the_fastest_run_of_each_concurrency_counts() -> None:
    rows = [row(0, 100, 2.0, 1), row(0, 100, 3.0, 4), row(0, 100, 1.0, 1), row(0, 100, 4.0, 4)]
    assert fastest(rows) == [rows[2], rows[1]]


def test_engines_that_wrote_different_numbers_of_tokens_are_pointed_out() -> None:
    with pytest.warns(UserWarning, match=r"must write the same number of tokens, but wrote 100 to 103, because"):
        warn_of_unequal_work([row(0, 100), row(3, 103)])
    rows = [row(0, 100), row(3, 101)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warn_of_unequal_work(rows)  # a difference of 1 % gives no warning
    assert [each.describe(speeds_of(rows))["speed_up"] for each in rows] == [1.0, 1.01]


@pytest.mark.parametrize("engine", ["vllm", "llama_cpp"])
def test_a_running_server_is_measured_and_its_report_claims_neither_head_nor_settings(
    fresh_run: tuple[Path, tuple[str, ...]],
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    """Needs no program, export or GGUF file on this machine."""
    monkeypatch.setattr(engine_server, "SETTLED_AFTER_S", 0.01)
    bench_settings = ("serving_bench.concurrency=[1,3]", "serving_bench.repeats=2")
    missing = ("serving.program=/none", f"serving.engine={engine}")
    with fake_server() as fake:
        fake.serves(tiny_target)
        url = f"serving.url={fake.url.replace('//', '//me:secret@')}"
        config = make_config(*fresh_run[1], *missing, url, *bench_settings, f"target.path={tiny_target}")
        output_dir = tmp_path / "bench"
        output_dir.mkdir()
        write(output_dir, tiny_target, method="eagle")  # by an earlier run
        bench = prepare(Run(config), output_dir)
        write_results(bench, *measure(bench, output_dir))
    report = json.loads((output_dir / "report.json").read_text())
    num_requests = report["requests"]
    assert num_requests == max(4, report["prompts"])
    assert len(fake.requests) == 3 + 4 * num_requests
    assert [(each["concurrency"], each["requests"]) for each in report["rows"]] == [(n, num_requests) for n in (1, 3)]
    for each in report["rows"]:
        assert each["rounds"] == 3 * num_requests and each["acceptance_length"] == pytest.approx(5 / 3)
        assert each["output_tokens"] == sum(map(len, (bench.prompts * num_requests)[:num_requests]))
        assert each["speed_up"] is each["num_speculative_tokens"] is None
    loads = {f"load_server_concurrency{size}_run{number}.json" for size in (1, 3) for number in (1, 2)}
    loads.add("load_server_warmup.json")
    assert {path.name for path in output_dir.iterdir()} == {"report.json", "plot.svg", *loads}
    assert report["head"] is report["dtype"] is None and report["url"].startswith("http://***@127.0.0.1:")


URL = "serving.url=http://127.0.0.1:9"


def test_a_sweep_that_cannot_be_run_is_refused() -> None:
    for override, others, message in (
        ("serving_bench.num_speculative_tokens=[0,1]", "", "must hold numbers of at least 1, but is [0, 1]; correct"),
        ("serving_bench.num_speculative_tokens=[4]", "head=peagle head.ttt_steps=3", "must be at most head.ttt_steps"),
        ("serving_bench.num_speculative_tokens=[1]", URL, "must be left out with serving.url, because"),
        ("serving_bench.num_requests=7", "", "must be at least 8, the largest of serving_bench.concurrency, but is 7"),
        ("serving_bench.server_args=[--x]", URL, "must be left out with serving.url, because"),
        ("serving.url=http://a:b@c", "serving.engine=openvino", "http://***@c; leave it out"),
        ("serving_check.concurrency=2", "serving.engine=openvino", "but is 2; leave it out, or set serv"),
    ):
        with pytest.raises(UserError) as refused:
            make_config(override, *others.split())
        assert str(refused.value).startswith(f"{override.split('=')[0]}: must ") and message in str(refused.value)
    make_config("serving_bench.num_speculative_tokens=[1,3,5]", "serving_bench.num_requests=8")


def test_bad_input_is_refused_before_anything_starts(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, settings = fresh_run
    for overrides, message in (
        ([URL], r"serving\.url: must be a running vLLM server .*, but http://127.0.0.1:9/\S+ does not answer"),
        (["serving.program=/none"], r"serving\.program: must be a Python with vLLM, but /none does not exist"),
        (["serving.engine=llama_cpp"], r"target\.gguf: must be the target as a GGUF file, which llama.cpp serves, but"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(Run(make_config(*settings, *overrides)), tmp_path)
    result = run_program("serving-bench", *settings, f"serving.program={sys.executable}")
    assert result.returncode == 1 and f"must be a Python with vLLM, but {sys.executable} has" in result.stderr
    assert not (run_dir / "serving_bench").exists()
