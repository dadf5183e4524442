"""Tests that the results, progress and failures of `vllm bench serve` are read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtptrain.serving.load_generator import Latencies, Load, LoadGenerator, Spread
from mtptrain.utils.errors import UserError
from tests.programs import fake_python


def test_latencies_are_those_of_requests_and_of_messages(tmp_path: Path) -> None:
    result = {
        "completed": 3,
        "total_output_tokens": 12,
        "duration": 4.0,
        "latencies": [1.0, 2.2, 0.3],
        "ttfts": [0.2, 0.2, 0.3],
        "output_lens": [5, 6, 1],
        "itls": [[0.3, 0.5], [1.0, 1.0], []],
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    latencies = Latencies.read(tmp_path / "result.json")
    assert latencies.output_tokens_per_s == 3.0
    assert latencies.ttft_ms.p50 == pytest.approx(200)
    # The times per token after the first are 0.8 s / 4 and 2 s / 5. An answer of one token has no such time.
    assert latencies.tpot_ms.mean == pytest.approx(300) and latencies.tpot_ms.p50 == pytest.approx(300)
    assert latencies.itl_ms.p50 == pytest.approx(750) and latencies.itl_ms.mean == pytest.approx(700)
    assert latencies.step_ms == pytest.approx(700), "of four gaps, none is the slowest tenth"
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)


def test_the_slowest_tenth_of_gaps_does_not_count_as_steps(tmp_path: Path) -> None:
    gaps = [0.01] * 15 + [0.03] * 3 + [2.0] * 2  # two steps also read the prompt of another request
    result = {**RESULT, "itls": [gaps[::2], gaps[1::2]]}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert Latencies.read(tmp_path / "result.json").step_ms == pytest.approx(1e3 * (15 * 0.01 + 3 * 0.03) / 18)


RESULT = {"completed": 2, "total_output_tokens": 4, "duration": 1.0, "latencies": [0.2, 0.4], "ttfts": [0.1, 0.2]}
RESULT |= {"output_lens": [2, 2], "itls": [[0.1], [0.2]], "errors": ["", ""]}


def generator_with(directory: Path, answers: list[dict[str, Any]], result: dict[str, Any]) -> LoadGenerator:
    """Returns a load generator whose fake Python writes the result and prints the answers for each load."""
    path = fake_python(
        directory,
        f"#!{sys.executable}\nimport json, pathlib, sys\nprint(json.dumps({{'version': '0.32.0', 'is_cpu': True}}), "
        f"flush=True)\nfor line in sys.stdin:\n    pathlib.Path(json.loads(line)['result_path']).write_text("
        f"{json.dumps(result)!r})\n    print({chr(10).join(map(json.dumps, answers))!r}, flush=True)\n",
    )
    return LoadGenerator([path], directory / "load.log")


def load(directory: Path) -> Load:
    names = {"name": "K0", "url": "http://here", "model": "m", "prompts_path": "p"}
    numbers = {"num_requests": 2, "concurrency": 1, "max_new_tokens": 2, "seed": 0}
    return Load(**names, **numbers, sampling={}, ignore_eos=True, result_path=str(directory / "result.json"))  # type: ignore[arg-type]


def test_a_load_says_how_many_requests_have_finished(tmp_path: Path) -> None:
    finished: list[int] = []
    answers = [{"done": 1}, {"done": 2}, {"result": str(tmp_path / "result.json")}]
    with generator_with(tmp_path, answers, RESULT) as generator:
        assert generator.version == "0.32.0" and generator.is_cpu
        assert generator.run(load(tmp_path), finished.append).output_tokens_per_s == 4.0
    assert finished == [1, 2]


ONE_FAILED = "must answer every request, but 1 of 2 failed at concurrency 1; the first error is:\nBad Request"


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://here", "KeyError: 'x'", "vllm bench serve: must answer its requests, but failed; .*\nKeyError"),
        ("http://here", "", f"http://here: {ONE_FAILED}"),
        ("", "", f"vllm bench serve: {ONE_FAILED}"),  # the engine has no server
    ],
)
def test_a_load_that_fails_says_why(tmp_path: Path, url: str, error: str, message: str) -> None:
    answer = {"error": error} if error else {"result": str(tmp_path / "result.json")}
    result = RESULT | {"errors": ["", "Bad Request"]}
    with generator_with(tmp_path, [answer], result) as generator, pytest.raises(UserError, match=f"^{message}"):
        generator.run(replace(load(tmp_path), url=url))


def test_a_worker_that_ended_between_two_loads_shows_its_log(tmp_path: Path) -> None:
    facts = 'import sys\nprint(\'{"version": "0.32.0", "is_cpu": true}\', flush=True)\nsys.exit(\'out of memory\')\n'
    generator = LoadGenerator([fake_python(tmp_path, f"#!{sys.executable}\n{facts}")], tmp_path / "load.log")
    message = r"^vllm bench serve: must answer, but ended with status 1; its log is \S+, and its last lines are:\nout"
    with generator, pytest.raises(UserError, match=message):
        generator._worker.process.wait()
        generator.run(load(tmp_path))
