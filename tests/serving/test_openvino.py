"""Tests that OpenVINO's counters equal ours, and that each of its traps is found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import Serve, check_equal
from tests.serving.workers import run_readme


@each(cases_of("openvino"))
def test_openvino_counts_as_we_do(serve_by_openvino: Serve, case: Case) -> None:
    check_equal(serve_by_openvino, case)


@pytest.mark.slow
def test_the_commands_of_the_readme_decode(run_of: Callable[[str], Run], openvino_python: Path, tmp_path: Path) -> None:
    printed = run_readme(run_of("openvino")[0] / "export/openvino", openvino_python, tmp_path)
    head = (tmp_path / "head_openvino/openvino_model.xml").read_text()
    assert "hidden_layers_list" in head and "eagle3_mode" in head and printed.strip()
