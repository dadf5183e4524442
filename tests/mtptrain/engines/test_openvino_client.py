"""Tests what OpenVINO counts for our answers, and its errors. tests/serving/test_openvino.py compares both."""

import sys
import warnings
from pathlib import Path

import pytest

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import Served
from mtptrain.engines.requests import Answer, EngineCounts, Load, Questions, Requests
from mtptrain.engines.table import running_engine
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.programs import fake_python

QUESTIONS = Questions([[1]], 2, [])
REQUESTS = Requests([[1, 2]], 4, 0.0, 1.0, 0, True, 0)


def test_drafts_past_the_end_of_an_answer_are_not_counted() -> None:
    whole = Generation([1, 2, 3, 4, 5, 6], 2, 0, 6, [2, 1, 0], [2, 1])
    cut = Generation([1, 2, 3, 4, 5, 6], 2, 0, 6, [2, 2, 1], [2, 3])
    counted, rule = running_engine("openvino").counted([whole, cut], 3, QUESTIONS)
    assert counted == EngineCounts(4, None, [4, 2, 0]) and "drafted tokens are not compared" in rule
    # Of an engine that accepts more drafts than it should make, `check_counts` of serving-check sees another K.
    assert EngineCounts.of_rounds([[1, 0], [4]], 3) == EngineCounts(3, None, [2, 1, 1, 1])
    assert EngineCounts.of_rounds([[], [0]], 3) == EngineCounts(1, None, [0, 0, 0])


CRASHES_ONCE = f"""#!{sys.executable}
import json, os, pathlib, sys
starts = pathlib.Path(__file__).parent / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if starts.read_text() == "x":
    os.abort()
answer = {{"version": "2026.3.0.0", "tokens": [[5, 6]], "steps": [[1, 1]]}}
answer["results"] = [{{"duration_s": 1.0, "steps_s": [[0.2, 0.3]], "tokens_of_steps": [[1, 3]]}}]
pathlib.Path(sys.argv[4]).write_text(json.dumps(answer))
"""
"""An OpenVINO that ends by SIGABRT when it is first asked, as the real one seldom does."""


def test_an_openvino_that_crashes_is_started_once_more(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    python = fake_python(tmp_path, CRASHES_ONCE)
    plain = python, TargetFiles(Path()), ServingConfig(), "float32", 8, 1
    served = Served(*plain, head_dir=Path(), facts={}, log_dir=tmp_path)
    engine = running_engine("openvino")
    assert engine.generate(served, 3, [QUESTIONS])[0].tokens == [[5, 6]]
    (tmp_path / "starts").unlink()
    version, (result,) = engine.run_loads(served, 3, REQUESTS, [Load("K3", 1, 1)], tmp_path)
    assert (version, result.answers) == ("2026.3.0.0", [Answer([0.2, 0.3], 4)])
    assert result.counts == EngineCounts(1, None, [1, 1, 0])
    crashed, untested = (
        [text in str(each.message) for each in user_warnings] for text in ("status -6", "only version")
    )
    assert crashed == [True, False] * 2 and untested == [False, True] * 2
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()  # any other failure is not tried again
    with pytest.raises(UserError, match="ended with status 1; its last lines"):
        engine.generate(served, 3, [QUESTIONS])
    assert len(user_warnings) == 4
