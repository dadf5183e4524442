"""Tests the client of a running vLLM server with a fake server that has the same pages and counters."""

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mtptrain.serving import engine_server
from mtptrain.serving.engine import EngineCounts
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.utils.errors import UserError

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="a"}} 2.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="/m/{{a}}",position="1"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="0"}} {accepted}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="a"}} {finished}.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="a"}} 0.0
"""


class FakeServer(ThreadingHTTPServer):
    """Answers like vLLM's server. Every completion increases the counters."""

    finished_per_request = 1

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_answered = 0
        self.answers: dict[str, bytes] = {}
        """Bodies to send instead of the usual ones, by path."""
        self.headers: dict[str, str] = {}
        self.is_busy = False
        """Whether the counters rise with every GET request too."""
        self.max_tokens: list[int] = []


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.num_answered += self.server.is_busy
        number = self.server.num_answered
        counters = {"drafts": 3 * number, "drafted": 6 * number, "accepted": 2 * number}
        texts = {
            "/v1/models": json.dumps({"data": [{"id": "a", "max_model_len": 64}]}),
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": METRICS.format(**counters, finished=number * self.server.finished_per_request),
        }
        self.reply(texts.get(self.path, ""))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_answered += 1
        assert request["temperature"] == 0 and request["return_token_ids"] and request["stop_token_ids"] == [7]
        self.reply(json.dumps({"choices": [{"token_ids": request["prompt"][::-1]}]}))

    def reply(self, text: str) -> None:
        self.send_response(302 if "Location" in self.server.headers else 200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.answers.get(self.path, text.encode()))

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
        UserError,
        match=r"the server must serve no other requests during the check, but finished 4 requests instead of 2",
    ):
        VllmServer(address(fake)).generate([[1], [2]], 4, [7])


def test_a_server_of_another_version_than_the_tested_one_is_warned_of(fake: FakeServer) -> None:
    fake.answers["/version"] = b'{"version": "0.33.1"}'
    with pytest.warns(UserWarning, match=r"serving\.url=http://.*: vLLM should be 0\.32, .*, but is 0\.33\.1; another"):
        VllmServer(address(fake))


def test_a_server_whose_counters_never_settle_is_refused(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "SETTLE_LIMIT_S", 1.0)
    server = VllmServer(address(fake))
    fake.is_busy = True
    with pytest.raises(UserError, match=r"must serve no other requests .*, but its counters still change 1 s after"):
        server.counts_since({}, 1)


MODEL = b'{"id": "a", "max_model_len": %s}'
NOT_VLLM: dict[str, tuple[str, bytes]] = {
    "version list": ("/version", b"[1]"),
    "version missing": ("/version", b"{}"),
    "version number": ("/version", b'{"version": 1}'),
    "nested": ("/version", b"[" * 100_000),
    "page": ("/version", b"<html>\n<p>"),
    "no model": ("/v1/models", b'{"data": []}'),
    "no length": ("/v1/models", b'{"data": [{"id": "a"}]}'),
    "null length": ("/v1/models", b'{"data": [%s]}' % (MODEL % b"null")),
    "text length": ("/v1/models", b'{"data": [%s]}' % (MODEL % b'"9"')),
    "no choices": ("/v1/completions", b"{}"),
    "text tokens": ("/v1/completions", b'{"choices": [{"token_ids": "12"}]}'),
    "metrics list": ("/v1/completions", b'{"choices": [{"token_ids": [1]}], "metrics": [1]}'),
    "not a number": ("/metrics", b"vllm:request_success_total NaN\n"),
    "infinity": ("/metrics", b"vllm:request_success_total +Inf\n"),
}


@pytest.mark.parametrize("case", NOT_VLLM)
def test_an_answer_that_vllm_would_not_give_is_refused_in_one_line(fake: FakeServer, case: str) -> None:
    path, body = NOT_VLLM[case]
    fake.answers[path] = body
    with pytest.raises(ValueError) as failed:
        VllmServer(address(fake)).generate([[1]], 4, [7])
    shown = " ".join(body.decode().split())[:200]
    assert str(failed.value) == (
        f"serving.url: must be a vLLM server, but {address(fake)}{path} answers {shown}; start `vllm serve` or correct "
        "the address"
    )


@pytest.mark.parametrize(
    ("headers", "answer", "message"),
    [
        (
            {"Content-Encoding": "gzip, gzip"},
            gzip.compress(gzip.compress(bytes(2**20))),
            "answers with Content-Encoding",
        ),
        ({}, bytes(2_000), "answers more than 1,000 bytes"),
    ],
    ids=["compressed", "too long"],
)
def test_an_answer_without_a_bound_is_refused(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], answer: bytes, message: str
) -> None:
    monkeypatch.setattr(engine_server, "MAX_BODY_BYTES", 1_000)
    fake.headers, fake.answers["/version"] = headers, answer
    with pytest.raises(ValueError, match=f"serving.url: must be a vLLM server, but .*/version {message}"):
        VllmServer(address(fake))


def test_a_password_in_the_address_is_not_shown(fake: FakeServer) -> None:
    fake.answers["/version"] = b"[]"
    with pytest.raises(ValueError, match=r"but http://\*\*\*@127\.0\.0\.1:\d+/version answers"):
        VllmServer(f"http://me:sesame@127.0.0.1:{fake.server_port}")


def test_redirects_without_end_are_refused(fake: FakeServer) -> None:
    fake.headers = {"Location": "/version"}
    with pytest.raises(ValueError, match=r"^serving\.url: must be a vLLM server, but \S+/version does not answer prop"):
        VllmServer(address(fake))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://127.0.0.1:99999", "http://[::1", "localhost", "http://" + "a" * 64]
)
def test_an_address_where_no_server_can_be_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"^serving\.url: must be a running vLLM server, but \S+ does not answer"):
        VllmServer(url)


def test_a_server_that_fails_while_it_answers_is_not_taken_for_another_program(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VllmServer(address(fake))
    monkeypatch.setattr(Handler, "do_POST", lambda self: self.send_error(500))
    message = r"serving\.url: must answer every request, but \S+ answers {}: .*; see the server's log"
    with pytest.raises(UserError, match=message.format(500)):
        server.generate([[1]], 4, [7])
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send_error(503))  # as while it loads
    with pytest.raises(UserError, match=message.format(503)):
        server.counters()
