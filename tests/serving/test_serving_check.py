"""Tests `mtptrain serving-check` with vLLM: a wrong head, rounding, several GPUs, and a server that runs already."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Run, run_program
from tests.sealed import describe_again


@pytest.fixture(scope="module")
def run(run_of: Callable[[str], Run]) -> Run:
    return run_of("vllm")


@pytest.fixture(scope="module")
def wrong_export(run: Run) -> Path:
    """Returns an export with one norm set to zero."""
    directory = shutil.copytree(run[0] / "export/vllm", run[0] / "export/wrong")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"norm.weight": 0 * tensors["norm.weight"]}, directory / "model.safetensors")
    describe_again(directory / "serving.json")
    return directory


def check(run: Run, output_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_program("serving-check", *run[1], f"serving.output_dir={output_dir}", *overrides)


def test_an_export_that_is_not_the_head_ends_with_status_1_and_the_first_draft_that_differs(
    run: Run, wrong_export: Path, tmp_path: Path
) -> None:
    result = check(run, tmp_path, f"serving.head_dir={wrong_export}")
    assert result.returncode == 1 and "but they differ in" in result.stderr
    report = json.loads((tmp_path / "serving_check/report.json").read_text())
    assert not report["is_equal"] and report["first_divergence"]["what"] == "draft"
    assert report["theirs"]["plain_greedy_answers"] == 12, "a wrong head must not change the answers"
    assert f"draft token {report['first_divergence']['position']} is" in result.stderr


@pytest.mark.slow
def test_in_bfloat16_acceptance_lengths_must_agree_within_2_percent(
    run: Run, wrong_export: Path, tmp_path: Path
) -> None:
    result = check(run, tmp_path, "acceptance.dtype=bfloat16", "serving.tensor_parallel_size=2")
    assert result.returncode == 0, result.stderr[-3000:]
    result = check(run, tmp_path, f"serving.head_dir={wrong_export}", "acceptance.dtype=bfloat16")
    assert result.returncode == 1
    assert " %" in result.stdout and "but they differ in" in result.stderr
