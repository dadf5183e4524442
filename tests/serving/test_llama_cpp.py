"""Tests that llama.cpp's counters equal ours, and that each of its traps is found. Its server is built once by make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtptrain.engines.llama_cpp.server import LlamaServer, server_arguments
from mtptrain.engines.load import send
from mtptrain.engines.process import started_server
from mtptrain.engines.requests import Load, Requests
from tests.conftest import Run, run_program
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import Serve, check_equal


@each(cases_of("llama_cpp"))
def test_llama_cpp_counts_as_we_do(serve_by_llama: Serve, case: Case) -> None:
    check_equal(serve_by_llama, case)


@pytest.mark.parametrize("drafts", [True, False])
def test_serving_check_asks_a_running_server(
    run_of: Callable[[str], Run], gguf_of: Callable[[str], Path], llama_server: Path, tmp_path: Path, drafts: bool
) -> None:
    run_dir, overrides = run_of("llama_cpp")
    head = (run_dir / "export/llama_cpp/model.gguf", "draft-eagle3", 3)
    arguments = server_arguments(gguf_of("llama"), 512, 1, True, head)
    if not drafts:
        index = arguments.index("--spec-type")
        del arguments[index : index + 2]
    command = [llama_server, *arguments]
    with started_server(LlamaServer, command, tmp_path / "log") as server:
        settings = f"serving.output_dir={tmp_path / 'check'}", f"serving.url={server.url}"
        result = run_program("serving-check", *overrides, *settings)
    if drafts:
        assert result.returncode == 0, result.stderr[-3000:]
        assert json.loads((tmp_path / "check/serving_check/report.json").read_text())["is_equal"]
    else:
        assert result.returncode != 0
        assert "drafts 0; " in result.stderr and "makes none without --spec-type" in result.stderr


def test_many_requests_of_a_bench_are_all_answered_and_their_steps_counted(
    run_of: Callable[[str], Run], llama_server: Path, gguf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A connection that was kept after a stream made every tenth request fail.

    A step takes less than a millisecond. It gives one token and those that it accepts. A token of ASCII has a message.
    """
    head = run_of("llama_cpp")[0] / "export/llama_cpp/model.gguf", "draft-eagle3", 3
    command = [llama_server, *server_arguments(gguf_of("llama"), 256, 2, False, head)]
    requests = Requests([[1, 2, 3], [4, 5]], 24, 0.0, 1.0, 0, True, 0)
    with started_server(AsciiServer, command, tmp_path / "log") as server:
        result = send(server, requests, Load("load", 60, 2))
    assert [answer.num_tokens for answer in result.answers] == [24] * 60
    assert result.counts is not None and result.counts.rounds > 0
    assert sum(len(answer.steps_s) for answer in result.answers) == 1440 - sum(result.counts.accepted_at)


class AsciiServer(LlamaServer):
    """A server that is asked for answers of ASCII."""

    def streamed_request(self, *request: Any) -> tuple[str, dict[str, Any]]:
        path, content = super().streamed_request(*request)
        return path, content | {"logit_bias": [[token, False] for token in range(128, 260)]}
