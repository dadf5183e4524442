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
if sys.argv[1] == "-c":
    print("2026.3.0.0 2.2.0")
    sys.exit()
starts = pathlib.Path(__file__).parent / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if starts.read_text() == "x":
    os.abort()
answer = {{"tokens": [[5, 6]], "accepted": [[2]], "duration_s": 1.0, "steps_s": [[0.2, 0.3]], "num_tokens": [4]}}
pathlib.Path(sys.argv[4]).write_text(json.dumps([answer]))
"""
"""An OpenVINO that ends by SIGABRT when it is first asked, as the real one seldom does."""


def test_an_openvino_that_crashes_is_started_once_more(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    python = fake_python(tmp_path, CRASHES_ONCE)
    engine = running_engine("openvino")
    program = engine.find_program(ServingConfig(program=str(python)))
    plain = program, TargetFiles(Path()), ServingConfig(), "float32", 8, 1
    served = Served(*plain, head_dir=Path(), facts={}, log_dir=tmp_path)
    assert engine.generate(served, 3, [QUESTIONS])[0].tokens == [[5, 6]]
    (tmp_path / "starts").unlink()
    version, (result,) = engine.run_loads(served, 3, REQUESTS, [Load("K3", 1, 1)], tmp_path)
    assert (version, result.answers) == ("2026.3.0.0 2.2.0", [Answer([0.2, 0.3], 4)])
    assert result.counts == EngineCounts(1, None, [1, 1, 0])
    untested, *crashed = (str(each.message) for each in user_warnings)
    assert "should be 2026.4.1.0 2.2.0, the only version" in untested
    assert len(crashed) == 2 and all("status -6" in each for each in crashed)
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()  # any other failure is not tried again
    with pytest.raises(UserError, match="ended with status 1; its last lines"):
        engine.generate(served, 3, [QUESTIONS])
    assert len(user_warnings) == 3
