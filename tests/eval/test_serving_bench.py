"""Tests that `mtptrain serving-bench` writes the fastest K for engines, and refuses bad input before it serves."""

import json
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from eval import serving_bench
from eval.engines import check_server, is_same_model
from eval.serving_bench import prepare, write_results
from eval.serving_speed.engine_runs import Bench, check_device, vllm_arguments
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.convert.engine_settings import write_engine_settings
from mtptrain.run import Run
from mtptrain.run_dir import write_provenance
from mtptrain.serving.bench_rows import Row, fastest, speeds_of, warn_of_unequal_work
from mtptrain.serving.depth_choice import (
    best_fixed_num_drafts,
    best_num_drafts,
    per_batch_size,
    why_fixed,
)
from mtptrain.serving.llama_server import LlamaServer
from mtptrain.serving.load_generator import Latencies, Spread
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, make_target, run_program
from tests.mtptrain.serving.test_break_even import store as store_costs
from tests.mtptrain.serving.test_vllm_server import FakeServer, address

SPEEDS = {
    1: {0: 100.0, 1: 120.0, 3: 150.0},
    2: {0: 180.0, 1: 220.0, 3: 250.0},
    4: {0: 300.0, 1: 330.0, 3: 320.0},
    8: {0: 500.0, 1: 400.0, 3: 300.0},
}
FACTS = {"method": "eagle", "speculative_settings": {}}


def test_the_fastest_k_wins_and_the_smaller_of_two_equal_ones() -> None:
    assert best_num_drafts(SPEEDS) == {1: 3, 2: 3, 4: 1, 8: 0}
    assert best_num_drafts({4: {3: 5.0, 1: 5.0, 0: 4.0}}) == {4: 1}


@pytest.mark.parametrize(
    ("best", "ranges"),
    [
        ({1: 3, 2: 3, 4: 1, 8: 0}, [[1, 3, 3], [4, 7, 1], [8, 8, 0]]),
        ({1: 5}, [[1, 1, 5]]),
        ({4: 3, 16: 1}, [[1, 15, 3], [16, 16, 1]]),
        ({1: 3, 2: 1, 4: 3}, [[1, 1, 3], [2, 3, 1], [4, 4, 3]]),
        ({1: 0, 8: 2}, [[1, 7, 0], [8, 8, 2]]),
    ],
)
def test_ranges_of_batch_sizes_start_at_1_and_have_no_gaps(best: dict[int, int], ranges: list[list[int]]) -> None:
    assert per_batch_size(best) == ranges
    for size, depth in best.items():
        assert [k for first, last, k in ranges if first <= size <= last] == [depth]


def test_one_k_for_all_sizes_has_the_largest_geometric_mean() -> None:
    speeds = {1: {0: 99.0, 1: 3.0, 3: 1.5}, 8: {0: 99.0, 1: 6.0, 3: 11.0}}
    # The product of speeds is 3 * 6 = 18 at K = 1 and 1.5 * 11 = 16.5 at K = 3, although 3 + 6 is less than 1.5 + 11.
    assert best_fixed_num_drafts(speeds) == 1


def test_only_methods_that_can_change_k_get_a_k_for_each_size() -> None:
    assert why_fixed("eagle", {}) is None and why_fixed("draft_model", {}) is None
    assert why_fixed("medusa", {}) == "vLLM's method medusa drafts a fixed number of tokens"
    assert "mask tokens" in str(why_fixed("eagle3", {"parallel_drafting": True}))


def write(
    config_for: Callable[..., PipelineConfig], directory: Path, target_dir: Path, head: str = "mtp", **facts: Any
) -> tuple[str, dict[str, Any] | None, str]:
    """Write the settings, and return the message, vLLM's settings and the README."""
    head_dir, config = directory / "export/vllm", config_for(f"head={head}").head
    speeds = facts.pop("speeds", SPEEDS)
    said = write_engine_settings(
        directory, speeds, {**FACTS, **facts}, head_dir, "a/new target", config, read_target_config(target_dir)
    )
    vllm, readme = directory / "vllm.json", directory / "README.md"
    return (
        said,
        json.loads(vllm.read_text()) if vllm.exists() else None,
        readme.read_text() if readme.exists() else "",
    )


def test_an_export_that_holds_the_target_is_what_the_command_serves(
    config_for: Callable[..., PipelineConfig], tmp_path: Path, tiny_target: Path
) -> None:
    _, vllm, readme = write(config_for, tmp_path, tiny_target, method="mtp", holds_target=True)
    assert vllm is not None and "model" not in vllm
    assert f"vllm serve {tmp_path}/export/vllm --speculative-config" in readme


def test_the_settings_are_files_that_the_readmes_commands_use(
    config_for: Callable[..., PipelineConfig], tmp_path: Path, tiny_target: Path
) -> None:
    said, vllm, readme = write(config_for, tmp_path, tiny_target)
    assert vllm == {
        "method": "eagle",
        "model": str(tmp_path / "export/vllm"),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 3, 3], [4, 7, 1], [8, 8, 0]],
    }
    assert f"vllm serve 'a/new target' --speculative-config \"$(cat {tmp_path}/vllm.json)\"\n" in readme
    assert "--model-path 'a/new target' " in readme
    assert "| 4 | 300 | **330** | 320 |" in readme and "K = 3 from batch size 1, K = 1 from batch size 4" in readme
    assert json.loads((tmp_path / "sglang.json").read_text())["4"] == {"candidate_steps": [1]}
    assert f"--speculative-adaptive --speculative-adaptive-config {tmp_path}/sglang.json\n" in readme
    assert "--speculative-num-steps 3 " in readme
    sglang_dir = tmp_path / "export/sglang"  # `mtptrain export` must write to where the command reads the head
    assert f"`export.output_dir={sglang_dir}`" in readme and f"-draft-model-path {sglang_dir} " in readme
    found = "fastest K by requests in flight: 3 at 1, 3 at 2, 1 at 4, 0 at 8"
    assert said == f"{found}; settings and commands: {tmp_path}/README.md"


def test_a_parallel_drafter_gets_one_k_and_the_reason(
    config_for: Callable[..., PipelineConfig], tmp_path: Path, tiny_target: Path
) -> None:
    _, vllm, readme = write(
        config_for,
        tmp_path,
        tiny_target,
        "peagle",
        method="eagle3",
        speculative_settings={"parallel_drafting": True},
    )
    assert vllm is not None and "num_speculative_tokens_per_batch_size" not in vllm
    assert vllm["num_speculative_tokens"] == 3 and vllm["parallel_drafting"]
    assert "One K for all batch sizes, because vLLM fixes the number of mask tokens" in readme
    assert not (tmp_path / "sglang.json").exists()
    assert "No settings: export.engine: must be vllm for head peagle, but is sglang" in readme


def test_no_settings_are_written_where_plain_decoding_always_wins(
    config_for: Callable[..., PipelineConfig], tmp_path: Path, tiny_target: Path
) -> None:
    said, vllm, readme = write(config_for, tmp_path, tiny_target, speeds={1: {0: 5.0, 3: 4.0}})
    assert said.startswith("decoding without drafts was the fastest at every concurrency")
    assert vllm is None and readme == "" and not (tmp_path / "sglang.json").exists()


class OnCpus:
    """Replaces the load generator of a vLLM that runs on CPUs."""

    version, is_cpu = "0.32.0", True


def test_a_vllm_for_cpus_is_refused_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(OnCpus())  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match=r"serving\.python: must have a vLLM that runs on GPUs, .* runs on CPUs"):
        check_device(OnCpus())  # type: ignore[arg-type]


def row(depth: int | None, output_tokens: int, duration_s: float = 2.0, concurrency: int = 1) -> Row:
    spread = Spread(1.0, 1.0, 1.0)
    return Row(depth, concurrency, Latencies(2, output_tokens, duration_s, spread, spread, spread, 1.0), None)


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
    assert [each.speed_up(speeds_of(rows)) for each in rows] == [1.0, 1.01]


def test_a_server_is_known_by_the_weights_of_its_directory_or_by_its_name(tmp_path: Path, tiny_target: Path) -> None:
    copied = shutil.copytree(tiny_target, tmp_path / "copied")
    assert is_same_model(str(copied), TargetFiles(tiny_target, str(tiny_target)))
    assert not is_same_model(str(make_target(tmp_path / "other", seed=1)), TargetFiles(tiny_target, str(tiny_target)))
    assert is_same_model("/far/away/Llama-8B", TargetFiles(tiny_target, "meta/llama-8b"))
    assert not is_same_model("meta/llama-1b", TargetFiles(tiny_target, "meta/llama-8b"))


@pytest.mark.parametrize("holds_target", [True, False])
def test_an_engine_without_drafts_loads_the_export_where_that_holds_the_target(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, tmp_path: Path, holds_target: bool
) -> None:
    """vLLM refuses the folder of a published MiMo, whose config.json asks for code; that of the export does not."""
    facts, export = {**FACTS, "holds_target": holds_target}, shutil.copytree(tiny_target, tmp_path / "export")
    target = TargetFiles(tiny_target, str(tiny_target))
    bench = Bench(config_for(), tmp_path, target, [[1, 2]], Path("python"), "", facts, export, None)
    loaded = {vllm_arguments(bench, num_drafts)[0] for num_drafts in (0, 3)}
    assert loaded == {str(export if holds_target else tiny_target)}


@pytest.fixture
def bench_of(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, tmp_path: Path
) -> Iterator[Callable[..., Bench]]:
    """Returns a function that makes the inputs for a running server, given the model with which it was started.

    The server is llama.cpp's if the target's GGUF file is given, too.
    """
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, daemon=True).start()

        def build(root: Path, gguf: Path | None = None) -> Bench:
            models = {"data": [{"id": "a", "root": str(root), "max_model_len": 512}]}
            fake.answers["/v1/models"] = json.dumps(models).encode()
            facts = {"build_info": "b11434-x", "model_path": str(root), "model_ftype": "all F32"}
            fake.answers["/props"] = json.dumps({**facts, "default_generation_settings": {"n_ctx": 512}}).encode()
            target = TargetFiles(tiny_target, str(tiny_target), given_gguf=str(gguf) if gguf else None)
            server = (VllmServer if gguf is None else LlamaServer)(address(fake))
            inputs = [[1] * 8], Path(sys.executable), None, {}, tmp_path / "export", server
            return Bench(config_for("serving_bench.concurrency=[1]"), tmp_path / "bench", target, *inputs)

        yield build
        fake.shutdown()


def check(bench: Bench) -> None:
    assert bench.server is not None
    check_server(bench.server, bench.target, bench.head_dir, bench.context_tokens)


def test_a_server_of_the_runs_own_export_is_accepted_although_it_holds_other_weights(
    bench_of: Callable[..., Bench], tiny_target: Path, tmp_path: Path
) -> None:
    """An export of MiMo's layer holds the target with another layer, and vLLM serves the export itself."""
    for name in ("export", "other"):
        make_target(tmp_path / name, seed=1)
    check(bench_of(tiny_target))
    check(bench_of(tmp_path / "other/../export"))
    with pytest.raises(
        ValueError, match=rf"serving\.url: the server must serve {tiny_target}, but \S+ serves \S+/other"
    ):
        check(bench_of(tmp_path / "other"))


def test_a_llama_server_is_known_by_its_file_whatever_its_name(bench_of: Callable[..., Bench], tmp_path: Path) -> None:
    gguf, served = tmp_path / "target.gguf", tmp_path / "served.gguf"
    for path in (gguf, served):
        path.write_bytes(b"weights")
    check(bench_of(served, gguf))
    check(bench_of(tmp_path / "elsewhere/target.gguf", gguf))
    served.write_bytes(b"others")
    with pytest.raises(ValueError, match=r"must serve \S+/target\.gguf, but \S+ serves \S+/served\.gguf, which is an"):
        check(bench_of(served, gguf))


def test_a_running_llama_server_needs_no_gguf_file_on_this_machine(
    bench_of: Callable[..., Bench], fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    server = bench_of(tmp_path / "served.gguf", tmp_path / "served.gguf").server
    assert server is not None
    config = make_config(*fresh_run[1], "serving.engine=llama_cpp", f"serving.url={server.url}")
    assert isinstance(prepare(Run(config), tmp_path / "bench").server, LlamaServer)


def test_a_benchmark_that_fails_keeps_the_earlier_report_and_its_settings(
    fresh_run: tuple[Path, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, settings = fresh_run
    write_provenance(run_dir / "serving_bench", make_config(*settings))
    (run_dir / "serving_bench/report.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in (run_dir / "serving_bench").iterdir()}

    def fail(_: object) -> None:
        raise UserError("the engine failed")

    monkeypatch.setattr(serving_bench, "prepare", lambda *_: None)
    monkeypatch.setattr(serving_bench, "measure", fail)
    with initialize_config_dir(RECIPES, version_base="1.3"):
        cfg = compose("pipeline", ["recipe=quickstart", *settings, "acceptance.max_new_tokens=7"])
    with pytest.raises(UserError, match="the engine failed"):
        serving_bench.main(load_config(cfg))
    assert {path.name: path.read_bytes() for path in (run_dir / "serving_bench").iterdir()} == before


def test_a_running_servers_report_leaves_no_settings_of_an_earlier_run_and_claims_neither_head_nor_prediction(
    bench_of: Callable[..., Bench],
    config_for: Callable[..., PipelineConfig],
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = bench_of(tiny_target)
    bench.output_dir.mkdir()
    write(config_for, bench.output_dir, tiny_target)
    store_costs(bench.config, TargetFiles(tiny_target))
    before = {path.name for path in bench.output_dir.iterdir()}
    assert before == {"vllm.json", "sglang.json", "README.md"}
    write_results(bench, [row(None, 100)], "0.32.0")
    assert {path.name for path in bench.output_dir.iterdir()} == {"report.json", "plot.svg"}
    report = json.loads((bench.output_dir / "report.json").read_text())
    assert report["head"] is None and report["url"] is None
    assert "predicted" not in capsys.readouterr().out.lower()


URL = "serving.url=http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("override", "others", "message"),
    [
        ("serving_bench.num_speculative_tokens=[1,3,3]", "", "must increase and begin at 1 or above, but is [1, 3, 3]"),
        ("serving_bench.num_speculative_tokens=[3,1]", "", "must increase and begin at 1 or above, but is [3, 1]"),
        ("serving_bench.num_speculative_tokens=[0,1]", "", "must increase and begin at 1 or above, but is [0, 1]"),
        ("serving_bench.num_speculative_tokens=[4]", "head=peagle head.ttt_steps=3", "must be at most head.ttt_steps"),
        ("serving_bench.num_speculative_tokens=[1]", URL, "must be left out with serving.url, because"),
        ("serving_bench.num_requests=7", "", "must be at least 8, the largest of serving_bench.concurrency, but is 7"),
        ("serving_bench.server_args=[--x]", URL, "must be left out with serving.url, because"),
        ("serving_bench.server_args=[--x]", "serving.engine=openvino", "must be left out with serving.engine=openvino"),
        ("serving.tensor_parallel_size=2", "serving.engine=llama_cpp", "must be left out with other engines than vLLM"),
        ("serving.openvino_weights=int8", "", "must be left out with other engines than OpenVINO, but is int8"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(override: str, others: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_config(override, *others.split())
    assert f"{override.split('=')[0]}: {message}" in str(refused.value)
    make_config("serving_bench.num_speculative_tokens=[1,3,5]", "serving_bench.num_requests=8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([URL], "serving.url: must be a running vLLM server, but http://127.0.0.1:9 does"),
        (
            [URL, "serving.engine=llama_cpp", "serving.llama_server=/none"],
            "serving.url: must be a running llama.cpp server, but http://127.0.0.1:9 does",
        ),
        (
            [URL, "serving.engine=openvino", "serving.openvino_python=/none"],
            "serving.url: must be the address of a server of vllm or llama_cpp, but serving.engine is openvino",
        ),
        (["serving.python=/none"], "serving.python: must be a Python with vLLM, but /none does not exist"),
        ([f"serving.python={sys.executable}"], f"serving.python: must be a Python with vLLM, but {sys.executable} has"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    fresh_run: tuple[Path, tuple[str, ...]], overrides: list[str], message: str
) -> None:
    run_dir, settings = fresh_run
    result = run_program("serving-bench", *settings, *overrides)
    assert result.returncode == 1 and message in result.stderr, result.stderr
    assert not (run_dir / "serving_bench").exists()


def test_a_damaged_report_of_costs_is_refused_before_an_engine_starts(
    fresh_run: tuple[Path, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.serving_bench.find_program", lambda _: Path("python"))
    run_dir, settings = fresh_run
    (run_dir / "serving_bench/break_even").mkdir(parents=True)
    (run_dir / "serving_bench/break_even/report.json").write_text("{}")
    with pytest.raises(ValueError, match=r"break_even/report\.json: must have the entries subject, rows"):
        prepare(Run(make_config(*settings)), run_dir / "serving_bench")
