"""Tests how the processes of engines fail, and that they end with their parent. No engine is needed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mtptrain.serving import engine_server
from mtptrain.serving.engine_server import EngineServer
from mtptrain.serving.llama_load import send_load
from mtptrain.serving.llama_server import LlamaProcess, LlamaServer
from mtptrain.serving.load_generator import Load, LoadGenerator
from mtptrain.serving.openvino_client import WORKER as OPENVINO_WORKER
from mtptrain.serving.server_process import BENCH_WORKER, ManagedServer, WorkerProcess
from mtptrain.serving.vllm_client import WORKER as VLLM_WORKER
from mtptrain.serving.vllm_client import GenerateJob
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.serving.worker import run_worker
from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import SPIN_COUNT
from tests.programs import fake_python, is_running, wait_until_ended

PYTHON = Path(sys.executable)
ROOT = Path(__file__).parents[3]
JOB = GenerateJob(name="job", target_dir="/none", prompts=[[1]], max_new_tokens=1, max_model_len=8)


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


@pytest.mark.parametrize(("ours", "theirs"), [(SPIN_COUNT, None), ("77", "77")])
def test_an_engine_waits_as_it_does_elsewhere_unless_the_user_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str | None
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", ours)
    code = "import json, os, sys; json.dump(os.environ.get('GOMP_SPINCOUNT'), open(sys.argv[-1], 'w'))"
    WorkerProcess([PYTHON, "-c", code, tmp_path / "server"], tmp_path / "log").process.wait()
    assert json.loads((tmp_path / "server").read_text()) == theirs
    (tmp_path / "worker.py").write_text(code)
    assert run_worker(PYTHON, tmp_path / "worker.py", "decode", {}, "engine") == theirs


SERVER = """
import http.server, json, os, sys, time, urllib.request

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path in ("/props", "/metrics"):
            print("out of memory", flush=True)
            os._exit(3)
        if self.path == "/hang":
            time.sleep(60)
        self.send_response(200 if self.path == "/health" else 500)
        self.end_headers()
        self.wfile.write(str(urllib.request.proxy_bypass("127.0.0.1")).encode())

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["timings_per_token"]
        for index, token in enumerate(request["prompt"]):
            timings = {"predicted_ms": 0.001 * (index // 3)}
            message = json.dumps({"content": chr(token), "stop": False, "timings": timings}, ensure_ascii=False)
            self.wfile.write(f"data: {message}".encode() + bytes([10, 10]))
        self.wfile.write(b'data: {"stop": true, "tokens_predicted": 7}')

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


def test_a_server_that_runs_on_is_named_with_its_log_and_other_errors_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def server() -> ManagedServer[NamedServer]:
        command = ["run", sys.executable, "-c", SERVER]
        return ManagedServer(PYTHON, command, tmp_path / "log", 60, NamedServer, "llama-server")

    message = r"^llama-server, whose log is \S+/log: must answer every request, but http\S+/slots answers 500: "
    with pytest.raises(UserError, match=message), server() as running:
        running.read("/slots", bytes)
    log_is_read = r"^llama-server, whose log is \S+/log: must be a llama-server server, but .*; read its log$"
    with pytest.raises(UserError, match=log_is_read), server() as running:
        running.read("/health", int)
    monkeypatch.setattr(engine_server, "REQUEST_TIMEOUT_S", 0.5)
    with pytest.raises(UserError, match=log_is_read.replace("a llama", "a running llama")), server() as running:
        running.read("/hang", bytes)
    message = r"^llama-server, whose log is \S+/log: the server must serve no other requests"
    with pytest.raises(UserError, match=message), server() as running:
        raise UserError(f"{running.shown_url}: the server must serve no other requests")
    with pytest.raises(UserError, match=r"^load\.log: "), server():
        raise UserError("load.log: must be another file")


@pytest.mark.parametrize("direct", ["", "example.org"])
def test_no_proxy_stands_between_a_server_of_this_machine_and_those_that_ask_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, direct)
    command = ["run", sys.executable, "-c", SERVER]
    with ManagedServer(PYTHON, command, tmp_path / "log", 60, NamedServer, "llama-server") as running:
        assert running.read("/health", bytes) == b"True"
        assert send_prompt([1], running.url, tmp_path)["output_lens"] == [7]


def send_prompt(prompt: list[int], url: str, directory: Path) -> dict[str, Any]:
    """Returns the result of a request, which `SERVER` answers with a message a token, three of them with one time."""
    (directory / "prompts.json").write_text(json.dumps([prompt]))
    paths = {"prompts_path": str(directory / "prompts.json"), "result_path": str(directory / "result.json")}
    load = Load("load", url, "", num_requests=1, concurrency=1, max_new_tokens=7, sampling={}, ignore_eos=True, seed=0,
                **paths)  # fmt: skip
    send_load(load)
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


@pytest.mark.parametrize("prompt", [[], [0x2028], [97, 0x85, 98]], ids=["only the last message", "U+2028", "U+0085"])
def test_the_messages_of_a_stream_may_lack_text_or_hold_line_breaks_of_unicode(
    tmp_path: Path, prompt: list[int]
) -> None:
    command = ["run", sys.executable, "-c", SERVER]
    with ManagedServer(PYTHON, command, tmp_path / "log", 60, NamedServer, "llama-server") as running:
        result = send_prompt(prompt, running.url, tmp_path)
    assert result["output_lens"] == [7] and result["ttfts"][0] > 0


def test_the_messages_of_a_stream_that_have_the_same_time_are_one_step(tmp_path: Path) -> None:
    command = ["run", sys.executable, "-c", SERVER]
    with ManagedServer(PYTHON, command, tmp_path / "log", 60, NamedServer, "llama-server") as running:
        (gaps,) = send_prompt([97, 97, 97, 98, 98, 98, 99], running.url, tmp_path)["itls"]
    assert len(gaps) == 2


def start_vllm(python: Path, log_path: Path) -> None:
    ManagedServer(python, ["serve", "target"], log_path, 1, VllmServer, "vllm serve").__enter__()


def generate_by_llama_cpp(program: Path, log_path: Path) -> None:
    LlamaProcess(program, [], log_path, timeout_s=1, may_round=False).generate([[1]], 1, [])


@pytest.mark.parametrize("start", [start_vllm, generate_by_llama_cpp])
def test_a_server_that_does_not_answer_in_time_is_killed_with_its_children(
    tmp_path: Path, start: Callable[[Path, Path], None]
) -> None:
    python = fake_python(tmp_path, f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\nwait\n")
    with pytest.raises(UserError, match=r"serving_bench\.start_timeout_s: the server must answer within 1 s, but"):
        start(python, tmp_path / "server.log")
    wait_until_ended(int((tmp_path / "child").read_text()))


def check_end_with_parent(parent: subprocess.Popen[bytes], pid_path: Path) -> None:
    """Kills the parent once its engine runs, whose process id is then in the file, and waits for the engine's end."""
    deadline = time.monotonic() + 120
    while not pid_path.exists() or not pid_path.read_text():
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child = int(pid_path.read_text())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_ended(child)


SLEEP = """
import os, time

def sleep():
    open({path!r}, "w").write(str(os.getpid()))
    time.sleep(300)
"""
VLLM = """
import sys, types
import sleeping

__version__, SamplingParams, LLM = "0", object, lambda **_: sleeping.sleep()
for name in ("", ".kv_transfer", ".kv_transfer.kv_connector.v1.example_hidden_states_connector"):
    sys.modules[f"vllm.distributed{name}"] = types.ModuleType(name)
    sys.modules[f"vllm.distributed{name}"].__getattr__ = lambda _: object
sys.modules["vllm.platforms"] = sys.modules["vllm.distributed"]
"""
OPENVINO = {
    "openvino.py": "",
    "openvino_genai.py": "",
    "optimum/commands/optimum_cli.py": "import sleeping; sleeping.sleep()",
}
SERVER_OF_VLLM = """
import subprocess, sys

assert sys.argv[1:] == ["--model", "target"]
subprocess.run([sys.executable, "-c", "import sleeping; sleeping.sleep()"])
"""
CONVERTED = {"target": "t", "head": "h", "converted_target": "/none/t", "converted_head": "/none/h", "weights": "fp32"}
RUN_WORKER = """
import json, sys
from pathlib import Path
from mtptrain.serving.server_process import WorkerProcess
from mtptrain.serving.worker import run_worker

worker, mode, job = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
if mode == "serve":
    WorkerProcess([sys.executable, worker, mode, job], Path(sys.argv[4])).process.wait()
run_worker(Path(sys.executable), worker, mode, job, "engine")
"""


@pytest.mark.parametrize(
    ("worker", "mode", "engine", "job"),
    [
        (VLLM_WORKER, "generate", {"vllm.py": VLLM}, [asdict(JOB)]),
        (OPENVINO_WORKER, "decode", OPENVINO, CONVERTED),
        (BENCH_WORKER, "serve", {"vllm/entrypoints/openai/api_server.py": SERVER_OF_VLLM}, "target"),
    ],
    ids=["vllm", "openvino, while it converts", "a child of vllm serve"],
)
def test_an_engine_ends_with_its_children_when_its_parent_is_killed(
    tmp_path: Path, worker: Path, mode: str, engine: dict[str, str], job: object
) -> None:
    for name, text in (engine | {"sleeping.py": SLEEP.format(path=str(tmp_path / "child"))}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    check_end_with_parent(
        subprocess.Popen(
            [sys.executable, "-c", RUN_WORKER, str(worker), mode, json.dumps(job), str(tmp_path / "log")],
            env=dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}"),
        ),
        tmp_path / "child",
    )
