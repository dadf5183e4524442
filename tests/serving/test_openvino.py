"""Tests that OpenVINO's counters equal ours, and that each of its traps is found."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.heads.eagle3 import LAYER_IDS
from tests.conftest import Run, run_program
from tests.sealed import describe_again
from tests.serving.cases import OPENVINO_CASES, Case, each
from tests.serving.ours import SHORT_BENCH, Serve, check_equal

ONE_OF_EACH = [Case("eagle3", "llama"), Case("dflash", "llama_shared"), Case("draft_model", "llama")]


@each(OPENVINO_CASES, ONE_OF_EACH)
def test_openvino_counts_as_we_do(serve_by_openvino: Serve, case: Case) -> None:
    check_equal(serve_by_openvino, case)


def test_openvinos_default_layers_are_not_ours(serve_by_openvino: Serve) -> None:
    """Tests that layers are written even for a head with the layers that all engines take by default."""
    case = Case("eagle3_default_layers", "llama_10_layers")
    check_equal(serve_by_openvino, case)
    _, theirs, counted = serve_by_openvino(case, without=LAYER_IDS)
    assert theirs.counts != counted


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], openvino_python: Path) -> Run:
    """Returns a run whose head is exported for OpenVINO."""
    engine = ("export.engine=openvino", "serving.engine=openvino", f"serving.openvino_python={openvino_python}")
    head = ("head=eagle3", "head.capture_layers=[1,2,3]")
    return make_run("eagle3", *head, *engine, "acceptance.num_prompts=12", "acceptance.max_new_tokens=32")


def test_serving_check_starts_openvino(run: Run, tmp_path: Path) -> None:
    result = run_program("serving-check", *run[1], f"serving.output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_equal"] and report["ours"] == report["theirs"] and report["engine"] == "openvino"
    assert report["ours"]["plain_greedy_answers"] == 12 and report["theirs"]["accepted_at"][0] > 0
    assert report["ours"]["drafted"] is None and report["rule"].startswith("OpenVINO reports the tokens of each round")
    assert "Serving check: OpenVINO 2026.4.1" in result.stdout and "drafted tokens are not compared" in result.stdout
    readme = (run[0] / "export/openvino/README.md").read_text()
    assert 'model.set_rt_info([0, 1, 2], "hidden_layers_list")' in readme and "for openvino 2026.4.1" in readme


@pytest.mark.slow
def test_the_commands_of_the_readme_decode(run: Run, openvino_python: Path, tmp_path: Path) -> None:
    readme = (run[0] / "export/openvino/README.md").read_text()
    commands, tools = readme.split("```")[1], openvino_python.parent
    result = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    head = (tmp_path / "head_openvino/openvino_model.xml").read_text()
    assert "hidden_layers_list" in head and "eagle3_mode" in head and result.stdout.strip()


def test_weights_of_8_bits_are_compared_on_openvinos_answers(run: Run, tmp_path: Path) -> None:
    settings = f"serving.output_dir={tmp_path}", "serving.openvino_weights=int8"
    result = run_program("serving-check", *run[1], *settings)
    assert result.returncode == 0, (result.stdout, result.stderr[-3000:])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["theirs"]["accepted_at"][0] > 0
    assert report["is_equal"] or "ours are those along the engine's answers" in result.stdout


def test_serving_bench_measures_openvino(run: Run, tmp_path: Path) -> None:
    settings = *SHORT_BENCH, f"serving_bench.output_dir={tmp_path / 'bench'}"
    result = run_program("serving-bench", *run[1], *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "bench/report.json").read_text())
    rows = {(row["num_speculative_tokens"], row["concurrency"]): row for row in report["rows"]}
    assert rows.keys() == {(depths, size) for depths in (0, 1, 3) for size in (1, 2)}
    for (depths, _), row in rows.items():
        assert (row["requests"], row["output_tokens"]) == (6, 6 * 32)
        assert row["ttft_ms"]["p50"] > 0 and row["tpot_ms"]["p50"] > 0
        if depths:  # the first token of an answer is the target's own
            assert len(row["accepted_at"]) == depths and row["accepted_at"][0] > 0
            assert row["rounds"] + sum(row["accepted_at"]) == 6 * 31
        else:
            assert row["accepted_at"] is None
    assert "OpenVINO 2026.4.1" in result.stdout and (tmp_path / "bench/plot.svg").is_file()
    assert not [path for path in (tmp_path / "bench").iterdir() if path.is_dir()], "converted models must be removed"


def test_a_worker_without_models_says_so(run: Run, tmp_path: Path) -> None:
    head = shutil.copytree(run[0] / "export/openvino", tmp_path / "head")
    tensors = head / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    describe_again(head / "serving.json")
    settings = f"serving.head_dir={head}", f"serving_bench.output_dir={tmp_path / 'bench'}"
    result = run_program("serving-bench", *run[1], *settings)
    assert result.returncode == 1
    assert "OpenVINO: the worker must end with a result, but ended with status 1; its last lines:" in result.stderr
    assert f"must be able to convert {head} to fp32, but fails as above; correct the model" in result.stderr
