"""Tests `mtptrain serving-check` with an engine that it starts, and with a server that runs already."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Run, run_program
from tests.sealed import describe_again
from tests.serving.conftest import vllm_server
from tests.serving.ours import OnDisk


@pytest.fixture(scope="module")
def run(exported_run: Callable[..., Run]) -> Run:
    return exported_run("acceptance.num_prompts=12", "acceptance.max_new_tokens=32")


@pytest.fixture(scope="module")
def wrong_export(run: Run) -> Path:
    """Returns an export with one norm set to zero."""
    directory = shutil.copytree(run[0] / "export/vllm", run[0] / "export/wrong")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"enorm.weight": 0 * tensors["enorm.weight"]}, directory / "model.safetensors")
    describe_again(directory / "serving.json")
    return directory


@pytest.fixture(scope="module")
def server(run: Run, vllm_python: str, target_of: Callable[[str], OnDisk]) -> Iterator[str]:
    """Yields the address of a vLLM server that drafts with the exported head."""
    draft = {"method": "eagle", "model": str(run[0] / "export/vllm"), "num_speculative_tokens": 3}
    arguments = ["--speculative-config", json.dumps(draft), "--no-enable-chunked-prefill"]
    arguments += ["--per-request-spec-decode-metrics", "detailed"]
    with vllm_server(vllm_python, target_of("llama").directory, run[0] / "server.log", *arguments) as url:
        yield url


def check(run: Run, output_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_program("serving-check", *run[1], f"serving.output_dir={output_dir}", *overrides)


def test_a_served_export_counts_as_we_do(run: Run, tmp_path: Path) -> None:
    result = check(run, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_equal"] and report["ours"] == report["theirs"] and report["first_divergence"] is None
    assert report["ours"]["plain_greedy_answers"] == report["prompts"] == 12
    assert 0 < report["ours"]["accepted_at"][2] < report["ours"]["rounds"]
    assert (
        f"{report['ours']['rounds']:,} │" in result.stdout and "vLLM 0.32" in result.stdout and "equal" in result.stdout
    )
    assert "recipe=quickstart" in json.loads((tmp_path / "stage.json").read_text())["argv"]


@pytest.mark.slow
def test_a_tensor_parallel_engine_counts_as_we_do_with_the_gpus_of_the_setting(run: Run, tmp_path: Path) -> None:
    result = check(run, tmp_path, "serving.tensor_parallel_size=2")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_equal"] and report["theirs"]["rounds"] > 0
    result = check(run, tmp_path, "serving.tensor_parallel_size=3")
    assert result.returncode != 0 and "must be divisible by tensor parallel size (3)" in result.stderr


def test_an_export_that_is_not_the_head_ends_with_status_1_and_the_first_draft_that_differs(
    run: Run, wrong_export: Path, tmp_path: Path
) -> None:
    result = check(run, tmp_path, f"serving.head_dir={wrong_export}")
    assert result.returncode == 1
    assert (
        "serving check: mtptrain and vLLM 0.32.0 must have equal counters and give the answers of plain greedy "
        "decoding, but they differ in" in result.stderr
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["is_equal"] and report["first_divergence"]["what"] == "draft"
    assert report["theirs"]["plain_greedy_answers"] == 12, "a wrong head must not change the answers"
    assert f"draft token {report['first_divergence']['position']} is" in result.stderr


@pytest.mark.slow
def test_in_bfloat16_acceptance_lengths_must_agree_within_2_percent(
    run: Run, wrong_export: Path, tmp_path: Path
) -> None:
    result = check(run, tmp_path, "acceptance.dtype=bfloat16")
    assert result.returncode == 0, result.stderr[-3000:]
    result = check(run, tmp_path, f"serving.head_dir={wrong_export}", "acceptance.dtype=bfloat16")
    assert result.returncode == 1
    assert " %" in result.stdout and "but they differ in" in result.stderr


@pytest.mark.slow
def test_a_running_server_counts_as_we_do(run: Run, server: str, tmp_path: Path) -> None:
    for number in range(2):  # the server's counters do not start again from zero
        result = check(run, tmp_path / str(number), f"serving.url={server}/")
        assert result.returncode == 0, result.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{number}/report.json").read_text()) for number in range(2))
    for name in ("command", "seal"):  # the commands name different output directories
        assert first.pop(name) != second.pop(name)
    assert first == second and first["is_equal"]


@pytest.mark.slow
def test_a_server_that_does_something_else_is_refused(run: Run, server: str, tmp_path: Path) -> None:
    for override, message in (
        (
            "acceptance.num_speculative_tokens=2",
            "serving.url: the engine must draft 2 tokens a round, but drafts 3; set",
        ),
        ("acceptance.max_new_tokens=500", "serving.url: the server's context must hold 538 tokens"),
    ):
        result = check(run, tmp_path, f"serving.url={server}", override)
        assert result.returncode != 0 and message in result.stderr
