"""Tests that OpenVINO's counters equal ours, and that each of its traps is found."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import Serve, check_equal


@each(cases_of("openvino"))
def test_openvino_counts_as_we_do(serve_by_openvino: Serve, case: Case) -> None:
    check_equal(serve_by_openvino, case)


@pytest.mark.slow
def test_the_commands_of_the_readme_decode(run_of: Callable[[str], Run], openvino_python: Path, tmp_path: Path) -> None:
    readme = (run_of("openvino")[0] / "export/openvino/README.md").read_text()
    commands, tools = readme.split("```")[1], openvino_python.parent
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-c", commands]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    head = (tmp_path / "head_openvino/openvino_model.xml").read_text()
    assert "hidden_layers_list" in head and "eagle3_mode" in head and result.stdout.strip()
