"""Tests how the processes of engines fail, and that they end with their parent. No engine is needed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtptrain.engines import process as server_process
from mtptrain.engines.llama_cpp.server import LlamaServer
from mtptrain.engines.process import SUPERVISOR, run_worker, started_server
from mtptrain.utils.errors import UserError
from tests.programs import fake_python, is_running, wait_until, wait_until_ended

PYTHON = Path(sys.executable)
SERVER = """
import http.server, json, os, signal, sys
answers, ended = int(sys.argv[1]), sys.argv[2]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global answers
        if self.path != "/health" and answers == 0:
            print("out of memory", flush=True)
            os._exit(3)
        answers -= self.path != "/health"
        self.send_response(200)
        self.end_headers()
        facts = {"build_info": "b0-", "model_path": "m", "model_ftype": "all F32"}
        facts |= {"default_generation_settings": {"n_ctx": 8}, "total_slots": 1}
        self.wfile.write(json.dumps(facts).encode() if self.path == "/props" else b"")

def end(*_):
    open(ended, "w").close()
    os._exit(0)

signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("num_answers", [0, 2], ids=["when it is connected to", "later"])
def test_a_server_that_ends_while_it_is_asked_names_its_log_and_no_address(tmp_path: Path, num_answers: int) -> None:
    command = [PYTHON, "-c", SERVER, str(num_answers), str(tmp_path / "ended")]
    message = r"llama-server: must run until all prompts are answered, but ended with status 3; its log is (\S+), and"
    with (
        pytest.raises(UserError, match=message) as ended,
        started_server(LlamaServer, command, tmp_path / "log") as server,
    ):
        server.counters()
    assert str(tmp_path / "log") in str(ended.value) and "out of memory" in str(ended.value)


def test_a_server_is_asked_without_a_proxy_and_to_end_and_the_errors_of_others_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(server_process, "ENDING_S", 0.1)
    with (
        pytest.raises(UserError, match=r"^report\.json: must be another file$"),
        started_server(LlamaServer, [PYTHON, "-c", SERVER, "9", str(tmp_path / "ended")], tmp_path / "log") as server,
    ):
        assert server.max_model_len == 8 and server.place == f"llama-server, whose log is {tmp_path}/log"
        raise UserError("report.json: must be another file")
    assert (tmp_path / "ended").exists(), "the server must be able to shut down"


def test_a_server_that_does_not_start_is_reported_and_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    message = (
        rf"^llama-server: must start, but ended with status 1; its log is {log}, and its last lines are:\nno model$"
    )
    with pytest.raises(UserError, match=message), started_server(LlamaServer, [PYTHON, "-c", "exit('no model')"], log):
        pass
    monkeypatch.setattr(server_process, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_process, "ENDING_S", 0.1)
    program = fake_python(tmp_path, f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\nwait\n")
    with (
        pytest.raises(UserError, match=r"must answer within 0\.5 s, but does not; read its log"),
        started_server(LlamaServer, [program], log),
    ):
        pass
    wait_until_ended(int((tmp_path / "child").read_text()))


def test_a_supervised_command_and_its_children_end_with_the_parent(tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"
    command = [PYTHON, SUPERVISOR, "sh", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
    child = int((tmp_path / "child").read_text())
    assert process.stdin is not None and is_running(child)
    process.stdin.close()  # as the end of the parent does
    wait_until_ended(child)
    assert process.wait(10) == -signal.SIGKILL


WORKER = """
import os, sys
from pathlib import Path
starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + "1")
if len(starts.read_text()) <= {crashes}:
    print("a fault", flush=True)
    os.abort()
Path(sys.argv[3]).write_text(Path(sys.argv[2]).read_text())
"""


@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_a_worker_that_crashes_is_started_once_more(
    tmp_path: Path, crashes: int, recwarn: pytest.WarningsRecorder
) -> None:
    (worker := tmp_path / "worker.py").write_text(WORKER.format(crashes=crashes))
    (starts := tmp_path / "starts").write_text("")
    if crashes == 2:
        with pytest.raises(
            UserError, match="must end with a result, but ended with status -6; its last lines:\na fault"
        ):
            run_worker(PYTHON, worker, str(starts), {"a": 1}, "OpenVINO")
    else:
        assert run_worker(PYTHON, worker, str(starts), {"a": 1}, "OpenVINO") == {"a": 1}
    assert len(starts.read_text()) == min(crashes + 1, 2)
    assert [str(each.message)[:57] for each in recwarn] == [
        "OpenVINO crashed with status -6, and is started once more"
    ] * bool(crashes)
