"""Tests how the processes of the serving benchmark fail, and that they end with their parent. vLLM is not needed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mtptrain.serving.engine_server import EngineServer
from mtptrain.serving.llama_server import LlamaServer
from mtptrain.serving.load_generator import LoadGenerator
from mtptrain.serving.server_process import BENCH_WORKER, ManagedServer
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.utils.errors import UserError
from tests.programs import is_running, wait_until_ended

PYTHON = Path(sys.executable)


def test_a_server_that_ends_names_its_log_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(UserError, match="vllm serve: must start, but ended with status 1; its log is") as refused:
        ManagedServer(PYTHON, ["serve", "target"], log, 60, VllmServer, "vllm serve").__enter__()
    assert str(log) in str(refused.value) and "No module named 'vllm'" in str(refused.value)


def test_a_load_generator_that_ends_names_its_log_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "load.log"
    with pytest.raises(UserError, match="vllm bench serve: must answer, but ended with status 1;") as refused:
        LoadGenerator([PYTHON, BENCH_WORKER, "load"], log).__enter__()
    assert str(log) in str(refused.value) and "No module named 'vllm'" in str(refused.value)


SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            print("out of memory", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


class NamedServer(EngineServer):
    name = command = "llama-server"


@pytest.mark.parametrize("connect", [LlamaServer, NamedServer], ids=["when it is connected to", "later"])
def test_a_server_that_ends_while_it_is_asked_names_its_log_and_no_address(
    tmp_path: Path, connect: type[EngineServer]
) -> None:
    server = ManagedServer(PYTHON, ["run", sys.executable, "-c", SERVER], tmp_path / "log", 60, connect, "llama-server")
    message = r"llama-server: must run until all prompts are answered, but ended with status 3; its log is (\S+), and"
    with pytest.raises(UserError, match=message) as ended, server as running:
        running.counters()
    assert str(tmp_path / "log") in str(ended.value) and "out of memory" in str(ended.value)


def sleeping_python(directory: Path) -> Path:
    """Returns the path of a fake Python that ignores its arguments, starts a sleeping child and waits."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {directory}/child\nwait\n")
    path.chmod(0o755)
    return path


def test_a_server_that_does_not_answer_in_time_is_killed_with_its_children(tmp_path: Path) -> None:
    python = sleeping_python(tmp_path)
    with pytest.raises(UserError, match=r"serving_bench\.start_timeout_s: the server must answer within 1 s, but"):
        ManagedServer(python, ["serve", "target"], tmp_path / "server.log", 1, VllmServer, "vllm serve").__enter__()
    wait_until_ended(int((tmp_path / "child").read_text()))


def test_a_worker_ends_with_its_children_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()  # a fake engine that starts a child and never answers
    (tmp_path / "vllm/__init__.py").write_text("")
    entry = tmp_path / "vllm/entrypoints/openai/api_server.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(
        textwrap.dedent(f"""
        import subprocess, sys
        assert sys.argv[1:] == ["--model", "target"]
        child = subprocess.Popen(["sleep", "300"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        child.wait()
        """)
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, sys.executable, str(BENCH_WORKER)],
        env=dict(os.environ, PYTHONPATH=str(tmp_path)),
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "child").read_text())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_ended(child)


PARENT = """
import subprocess, sys
worker = [sys.argv[1], sys.argv[2], "serve", "target"]
subprocess.Popen(worker, stdin=subprocess.PIPE, start_new_session=True).wait()
"""
