"""Tests what OpenVINO counts for our answers, and its errors. tests/serving/test_openvino.py compares both."""

from pathlib import Path

import pytest

from mtptrain.decoding.speculate import Generation
from mtptrain.serving.engine import EngineCounts
from mtptrain.serving.openvino_client import OpenvinoModels, OpenvinoProcess, counts_of, find_openvino_python
from mtptrain.serving.openvino_load import check_openvino
from mtptrain.utils.errors import UserError


def test_drafts_past_the_end_of_an_answer_are_not_counted() -> None:
    whole = Generation([1, 2, 3, 4, 5, 6], 2, 0, 6, [2, 1, 0], [2, 1])
    cut = Generation([1, 2, 3, 4, 5, 6], 2, 0, 6, [2, 2, 1], [2, 3])
    process = OpenvinoProcess(OpenvinoModels(Path(), Path(), Path()), 3)
    counted, rule = process.counted([whole, cut], 3, 6, [])
    assert counted == EngineCounts(4, None, [4, 2, 0]) and "drafted tokens are not compared" in rule


def test_an_engine_that_accepts_more_drafts_than_it_should_make_is_found() -> None:
    """Tests that `check_counts` of serving-check then sees another K."""
    assert counts_of([[1, 0], [4]], 3) == EngineCounts(3, None, [2, 1, 1, 1])
    assert counts_of([[], [0]], 3) == EngineCounts(1, None, [0, 0, 0])


def test_a_head_with_which_openvino_decodes_one_request_at_a_time_is_refused_for_more() -> None:
    check_openvino("dflash", [1], 0.0)
    check_openvino("eagle3", [1, 2], 0.0)
    with pytest.raises(UserError, match=r"serving_bench\.concurrency: must be \[1\] with head dflash in OpenVINO"):
        check_openvino("dflash", [1, 2], 0.0)
    with pytest.raises(UserError, match=r"acceptance\.temperature: must be 0 in OpenVINO .* but is 0\.7; leave it out"):
        check_openvino("eagle3", [1], 0.7)


def test_a_python_without_openvino_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    message = r"serving\.openvino_python: must be a Python with OpenVINO GenAI, but .* {}; run `make"
    with pytest.raises(UserError, match=message.format("does not exist")):
        find_openvino_python(str(python))
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=message.format("has none")):
        find_openvino_python(str(python))
