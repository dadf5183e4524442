"""Tests of the client without vLLM: finding its Python, reporting its failures, and reading the counters of a
server."""

import json
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mtptrain.serving import vllm_client as vllm
from mtptrain.serving.exports import served_model, speculative_config
from mtptrain.serving.vllm_client import EngineCounts, GenerateJob, VllmProcess, VllmServer

JOB = GenerateJob(name="job", target_dir="/none", prompts=[[1]], max_new_tokens=1, max_model_len=8)
METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="a"}} 2.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="1"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="0"}} {accepted}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="a"}} {finished}.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="a"}} 0.0
"""


class FakeServer(ThreadingHTTPServer):
    """Answers like vLLM's server; every completion increases the counters."""

    finished_per_request = 1

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_answered = 0
        self.max_tokens: list[int] = []


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        number = self.server.num_answered
        counters = {"drafts": 3 * number, "drafted": 6 * number, "accepted": 2 * number}
        texts = {
            "/v1/models": json.dumps({"data": [{"id": "a", "max_model_len": 64}]}),
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": METRICS.format(**counters, finished=number * self.server.finished_per_request),
        }
        self.reply(texts[self.path])

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_answered += 1
        assert request["temperature"] == 0 and request["return_token_ids"] and request["stop_token_ids"] == [7]
        self.reply(json.dumps({"choices": [{"token_ids": request["prompt"][::-1]}]}))

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def address(server: FakeServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_servers_counters_are_differences_summed_over_engines_and_in_the_order_of_positions(fake: FakeServer) -> None:
    fake.num_answered = 5  # requests served earlier do not count
    run = VllmServer(address(fake) + "/").generate([[1, 2], [3]], 4, [7])
    assert run.counts == EngineCounts(rounds=6, drafted=12, accepted_at=[4, 0])
    assert run.tokens == [[2, 1], [3]] and run.accepted_by_round is None and run.version == "0.32.0"


def test_a_server_that_serves_others_too_is_refused(fake: FakeServer) -> None:
    fake.finished_per_request = 2
    with pytest.raises(
        RuntimeError,
        match=r"the server must serve no other requests during the check, but finished 4 requests instead of 2",
    ):
        VllmServer(address(fake)).generate([[1], [2]], 4, [7])


def test_an_address_where_nothing_answers_is_refused(fake: FakeServer) -> None:
    url = address(fake)
    fake.shutdown()
    fake.server_close()
    with pytest.raises(
        ConnectionError, match=rf"serving\.url: must be a running vLLM server, but {url} does not answer"
    ):
        VllmServer(url)


def test_a_server_that_is_not_vllm_is_refused(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send_error(404))
    with pytest.raises(ValueError, match=r"serving\.url: must be a vLLM server, but http://\S+/version answers 404"):
        VllmServer(address(fake))


def test_a_python_that_does_not_exist_or_has_no_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"serving\.python: must be a Python with vLLM, but \S+/none does not exist; run `make"
    ):
        vllm.find_python(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"serving\.python: must be a Python with vLLM, but \S+ has none; run `make"):
        vllm.find_python(sys.executable)


def engine_that_fails(directory: Path) -> str:
    """A Python whose worker returns an engine's error as its result."""
    python = directory / "python"
    result = json.dumps({"version": "0.32.0", "results": [{"error": "no kernel image is available"}]})
    python.write_text(f'#!/bin/sh\n[ "$1" = -I ] && exit 0\necho \'{result}\' >"$4"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


@pytest.mark.parametrize(
    ("holds_target", "message"),
    [
        (False, "vLLM: must serve {head} for /target, but raised:\nno kernel image is available"),
        (True, "vLLM: must serve {head}, but raised:\nno kernel image is available"),
    ],
)
def test_an_engine_that_fails_is_reported_with_the_export_that_it_served(
    tmp_path: Path, holds_target: bool, message: str
) -> None:
    facts = {"method": "mtp", "holds_target": holds_target}
    engine = VllmProcess(
        python=engine_that_fails(tmp_path),
        target_dir=Path(served_model(facts, tmp_path, "/target")),
        speculative_config=speculative_config(facts, tmp_path, 3),
        hf_overrides=None,
        dtype="float32",
        max_model_len=8,
        kv_cache_memory_bytes=None,
        tensor_parallel_size=1,
        device_type="cpu",
    )
    with pytest.raises(RuntimeError) as failed:
        engine.generate([[1]], 1, [])
    assert str(failed.value) == message.format(head=tmp_path.resolve())


def test_a_worker_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -I ] && exit 0\necho "libsomething.so: cannot open shared object file"\nexit 3\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(
        RuntimeError, match=r"(?s)must end with a result, but ended with status 3; .*libsomething\.so: cannot open"
    ):
        vllm.generate([JOB], str(python))
