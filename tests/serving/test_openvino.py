"""Tests that OpenVINO's counters equal ours, and that each of its traps is found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.as_served import CHAT, other_chat
from mtptrain.data.chat_template import render_prompt
from mtptrain.target.files import TargetFiles
from tests.conftest import Run
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import OnDisk, Serve, check_equal
from tests.serving.workers import run_readme


@each(cases_of("openvino"))
def test_openvino_counts_as_we_do(serve_by_openvino: Serve, case: Case) -> None:
    check_equal(serve_by_openvino, case)


def test_openvinos_own_prompt_of_a_chat_is_compared_with_the_templates(
    serve_by_openvino: Serve, target_of: Callable[[str], OnDisk]
) -> None:
    case = next(iter(cases_of("openvino")))
    target, (_, theirs, _) = TargetFiles(target_of(case.target).directory), serve_by_openvino(case)
    assert theirs.chat_ids == render_prompt(target.tokenizer, CHAT)
    assert not other_chat(target, "OpenVINO", theirs.chat_ids)


@pytest.mark.slow
def test_the_commands_of_the_readme_decode(run_of: Callable[[str], Run], openvino_python: Path, tmp_path: Path) -> None:
    printed = run_readme(run_of("openvino")[0] / "export/openvino", openvino_python, tmp_path)
    head = (tmp_path / "head_openvino/openvino_model.xml").read_text()
    assert "hidden_layers_list" in head and "eagle3_mode" in head and printed.strip()
