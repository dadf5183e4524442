"""`eval.serving_check` refuses settings and exports that it cannot compare, before it serves anything."""

import json
from pathlib import Path

import pytest

from mtptrain.serving.exports import read_serving_facts
from tests.conftest import run_program


def test_a_check_of_sampled_decoding_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    result = run_program(
        "eval.serving_check", f"run_dir={tmp_path}", f"target.path={tiny_target}", "acceptance.temperature=0.7"
    )
    assert result.returncode != 0
    assert (
        "must be 0 for this check, because at a higher temperature drafts are accepted at random, but is 0.7; leave"
        in result.stderr
    )


def test_a_folder_without_an_export_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"serving\.json: must exist, but does not; run mtptrain\.export"):
        read_serving_facts(tmp_path, "vllm", "of this run")


def test_an_export_for_another_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(json.dumps({"engine": "sglang"}))
    with pytest.raises(
        ValueError, match=r"serving\.json: engine must be vllm, but is sglang; run mtptrain\.export with"
    ):
        read_serving_facts(tmp_path, "vllm", "of this run")


def test_an_export_of_another_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(json.dumps({"engine": "vllm", "head_sha256": "before"}))
    with pytest.raises(
        ValueError, match=r"head_sha256 must be of this run, .* but is before, the hash of another head; run mtptrain"
    ):
        read_serving_facts(tmp_path, "vllm", "of this run")
