"""Tests what OpenVINO counts for our answers, and its errors. tests/serving/test_openvino.py compares both."""

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtptrain.decoding.speculate import Generation
from mtptrain.serving.engine import EngineCounts
from mtptrain.serving.load_generator import Load
from mtptrain.serving.openvino_client import (
    OpenvinoModels,
    OpenvinoProcess,
    counts_of,
    find_openvino_python,
    openvino_version,
)
from mtptrain.serving.openvino_load import OpenvinoEngine, check_openvino
from mtptrain.utils.errors import UserError
from tests.programs import fake_python


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


def test_another_openvino_than_the_tested_one_is_warned_of(user_warnings: list[warnings.WarningMessage]) -> None:
    for version in ("2026.4.1.0", "2026.3.0.0"):
        OpenvinoModels(Path("python"), Path(), Path()).warn_of_untested(version)
    assert [str(warning.message) for warning in user_warnings] == [
        "serving.openvino_python=python: OpenVINO GenAI should be 2026.4.1, the only version that mtptrain was tested "
        "with, but is 2026.3.0.0; another version may read exports differently"
    ]


def test_a_head_with_which_openvino_decodes_one_request_at_a_time_is_refused_for_more() -> None:
    check_openvino("dflash", [1], 0.0)
    check_openvino("eagle3", [1, 2], 0.0)
    with pytest.raises(UserError, match=r"serving_bench\.concurrency: must be \[1\] with head dflash in OpenVINO"):
        check_openvino("dflash", [1, 2], 0.0)
    with pytest.raises(UserError, match=r"acceptance\.temperature: must be 0 in OpenVINO .* but is 0\.7; leave it out"):
        check_openvino("eagle3", [1], 0.7)


Status = Enum("Status", ["RUNNING", "FINISHED", "IGNORED"])


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker with stand-ins for OpenVINO's modules, which have an environment of their own."""
    openvino: Any = SimpleNamespace(Tensor=lambda ids: ids)
    openvino_genai: Any = SimpleNamespace(GenerationStatus=Status, GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    monkeypatch.setitem(sys.modules, "openvino_genai", openvino_genai)
    name = "mtptrain.serving.openvino_worker"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


class Handle:
    """A request in OpenVINO that ends in its first step, with two tokens or without any."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def get_status(self) -> Status:
        return self.status

    def can_read(self) -> bool:
        return self.status is Status.FINISHED

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=[5, 6])}


def test_a_request_that_openvino_gives_up_is_an_error_and_no_answer(worker: Any, tmp_path: Path) -> None:
    statuses = [Status.FINISHED, Status.IGNORED, Status.FINISHED]
    pipeline = SimpleNamespace(
        add_request=lambda index, prompt, config: Handle(statuses[index]),
        step=lambda: None,
        get_config=lambda: SimpleNamespace(eos_token_id=0, stop_token_ids=set()),
    )
    paths = {"prompts_path": str(tmp_path / "prompts.json"), "result_path": str(tmp_path / "result.json")}
    (tmp_path / "prompts.json").write_text("[[1, 2]]")
    load = {**paths, "num_requests": 3, "concurrency": 2, "max_new_tokens": 4, "ignore_eos": True}
    done: list[int] = []
    worker.run_load(pipeline, load, 0, done.append)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done == [2, 3] and result["completed"] == 2 and result["output_lens"] == [2, 2]
    assert result["errors"] == ["ended with status IGNORED after 0 tokens"]


@pytest.mark.parametrize(
    ("weights", "advice"), [("fp32", "correct the model"), ("int8", "set serving.openvino_weights=fp32, or correct")]
)
def test_a_model_that_cannot_be_converted_is_told_what_may_help(
    worker: Any, tmp_path: Path, weights: str, advice: str
) -> None:
    with pytest.raises(SystemExit, match=f"must be able to convert .* to {weights}, but fails as above; {advice}"):
        worker.convert(tmp_path / "none", tmp_path / "converted", weights, True)


def test_an_openvino_on_pythonpath_is_found_but_none_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino_genai-2026.4.1.dist-info").mkdir()
    (tmp_path / "openvino_genai-2026.4.1.dist-info/METADATA").write_text("Name: openvino-genai\nVersion: 2026.4.1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert openvino_version(Path(sys.executable)) == ""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert openvino_version(Path(sys.executable)) == "2026.4.1"


def test_a_python_without_openvino_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    message = r"serving\.openvino_python: must be a Python with OpenVINO GenAI, but .* {}; run `make"
    with pytest.raises(UserError, match=message.format("does not exist")):
        find_openvino_python(str(python))
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=message.format("has none")):
        find_openvino_python(str(python))


CRASHES_ONCE = f"""#!{sys.executable}
import json, os, pathlib, sys
directory, kind, job = pathlib.Path(__file__).parent, sys.argv[2], json.loads(pathlib.Path(sys.argv[3]).read_text())
starts = directory / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if kind == "decode":
    answer = {{"version": "2026.4.1.0", "tokens": [[5, 6]], "steps": [[1, 1]]}}
    os.abort() if starts.read_text() == "x" else pathlib.Path(sys.argv[4]).write_text(json.dumps(answer))
else:
    print(json.dumps({{"version": "2026.4.1", "is_cpu": True}}), flush=True)
    for line in sys.stdin:
        if starts.read_text() == "x":
            os.abort()
        load = json.loads(line)
        result = {{"completed": load["num_requests"], "total_output_tokens": 4, "duration": 1.0}}
        result |= {{"ttfts": [0.2], "latencies": [0.2], "output_lens": [2], "itls": [[0.1]], "errors": []}}
        pathlib.Path(load["result_path"]).write_text(json.dumps(result | {{"tokens_of_steps": [[1, 3]]}}))
        print(json.dumps({{"result": load["result_path"]}}), flush=True)
"""
"""An OpenVINO that ends by SIGABRT when it is first asked, as the real one seldom does."""


def test_an_openvino_that_crashes_is_started_once_more(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    models = OpenvinoModels(fake_python(tmp_path, CRASHES_ONCE), Path(), Path())
    assert OpenvinoProcess(models, 3).generate([[1]], 2, []).tokens == [[5, 6]]
    (tmp_path / "starts").unlink()
    load = Load("K3", "", "", "p", 6, 2, 4, {}, True, 0, str(tmp_path / "result.json"))
    with OpenvinoEngine(models, 3, tmp_path, tmp_path / "server.log") as engine:
        latencies, counts = engine.send(load, lambda _: None)
    assert latencies.requests == 6 and counts == EngineCounts(1, None, [1, 1, 0])
    assert ["ended with status -6" in str(warning.message) for warning in user_warnings] == [True, True]
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()  # any other failure is not tried again
    with pytest.raises(UserError, match="ended with status 1; its last lines"):
        OpenvinoProcess(models, 3).generate([[1]], 2, [])
    assert len(user_warnings) == 2
