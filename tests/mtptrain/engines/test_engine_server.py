"""Tests the clients of running servers with a fake server that has the same pages and counters."""

from pathlib import Path

import pytest

from mtptrain.engines import server as engine_server
from mtptrain.engines.llama_cpp.server import LlamaServer
from mtptrain.engines.requests import EngineCounts, Questions
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.engines.fake_server import FakeServer


def test_a_servers_counters_are_differences_summed_over_engines_and_in_the_order_of_positions(fake: FakeServer) -> None:
    fake.num_answered = 5  # requests served earlier do not count
    run = VllmServer(fake.url + "/").generate(Questions([[1, 2], [3]], 4, [7]))
    assert run.counts == EngineCounts(rounds=6, drafted=12, accepted_at=[4, 0])
    assert run.tokens == [[2, 1], [3]] and run.accepted_by_round is None and run.version == "0.32.0"
    for request in fake.requests:
        assert request["temperature"] == 0 and request["return_token_ids"] and request["stop_token_ids"] == [7]


def test_a_server_that_serves_others_too_is_refused(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.finished_per_request = 2
    busy = r"^serving\.url: the server must serve no other requests during the check, but "
    with pytest.raises(UserError, match=busy + "finished 4 requests instead of 2; repeat"):
        VllmServer(fake.url).generate(Questions([[1], [2]], 4, [7]))
    monkeypatch.setattr(engine_server, "SETTLE_LIMIT_S", 0.1)
    server = VllmServer(fake.url)
    fake.is_busy = True
    with pytest.raises(UserError, match=busy + r"its counters still change 0\.1 s after"):
        server.counts_since({}, 1)


def test_an_answer_that_an_engine_would_not_give_is_refused_in_one_line(fake: FakeServer) -> None:
    for path, body in (
        ("/version", b"<html>\n<p>"),
        ("/v1/models", b'{"data": []}'),
        ("/v1/completions", b'{"choices": [{"token_ids": [1]}], "metrics": [1]}'),
        ("/metrics", b"vllm:request_success_total NaN\n"),
    ):
        fake.answers = {path: body}
        with pytest.raises(UserError) as failed:
            VllmServer(fake.url).generate(Questions([[1]], 4, [7]))
        shown = " ".join(body.decode().split())
        assert f"answers every request, but {fake.url}{path} answers 200: {shown}; see" in str(failed.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://127.0.0.1:99999", "http://[::1", "localhost", "http://" + "a" * 64]
)
def test_an_address_where_no_server_can_be_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"^serving\.url: must be a running vLLM server .*, but \S+ does not answer \("):
        VllmServer(url)


def test_a_server_that_fails_while_it_answers_is_not_taken_for_another_program(fake: FakeServer) -> None:
    server = VllmServer(fake.url)
    fake.status = 503  # as while it loads
    message = rf"serving\.url: must be .* every request, but {fake.url}/\S+ answers 503: .*; see the server's log"
    with pytest.raises(UserError, match=message):
        server.generate(Questions([[1]], 4, [7]))
    fake.status = 501
    with pytest.raises(UserError, match=r"must be a running llama\.cpp server .* 501: .*, start `llama-server --m"):
        LlamaServer(fake.url)


def test_a_password_in_the_address_is_not_shown(fake: FakeServer) -> None:
    fake.answers["/version"] = b"[]"
    with pytest.raises(UserError) as failed:
        VllmServer(fake.url.replace("//", "//me:sesame@") + "/?key=sesame&model=a")
    assert "/?key=***&model=***/version answers" in str(failed.value) and "sesame" not in str(failed.value)


def test_a_server_is_known_by_the_weights_of_its_directory_or_by_its_name(
    fake: FakeServer, tmp_path: Path, tiny_target: Path
) -> None:
    """An export of MiMo's layer holds the target with another layer, and vLLM serves the export itself."""
    other, target = make_target(tmp_path / "other", seed=1), TargetFiles(tiny_target, "meta/llama-8b")
    for root, head_dir, is_right in (
        (tiny_target, "none", True),
        (other, other, True),
        (other / "../other", other, True),
        (other, "none", False),
        ("/far/away/Llama-8B", "none", True),
        ("meta/llama-1b", "none", False),
    ):
        fake.serves(root)
        server = VllmServer(fake.url)
        if is_right:
            server.check_model(target, Path(head_dir))
            continue
        with pytest.raises(UserError, match=rf"the server must serve meta/llama-8b, but \S+ serves {root}; ask"):
            server.check_model(target, Path(head_dir))
    server.check_room(512, 9)
    with pytest.raises(
        UserError, match=r"context must hold 513 tokens .* but holds 512; start it with --max-model-len"
    ):
        server.check_room(513)
    with pytest.raises(UserError, match=r"answer 5 requests at a time, but has 4 slots; start it with -np 5, or lower"):
        LlamaServer(fake.url).check_room(512, 5)


def test_a_llama_server_is_known_by_its_file_whatever_its_name(
    fake: FakeServer, tmp_path: Path, tiny_target: Path
) -> None:
    gguf, served = tmp_path / "target.gguf", tmp_path / "served.gguf"
    for path in (gguf, served):
        path.write_bytes(b"weights")

    def check(root: Path, given_gguf: str | None) -> None:
        fake.serves(root)
        LlamaServer(fake.url).check_model(TargetFiles(tiny_target, given_gguf=given_gguf), tmp_path)

    check(served, str(gguf))
    check(tmp_path / "elsewhere/target.gguf", str(gguf))
    served.write_bytes(b"others")
    check(served, None)  # a server needs no GGUF file on this machine
    with pytest.raises(UserError, match=r"must serve \S+/target\.gguf, but \S+ serves \S+/served\.gguf, which is an"):
        check(served, str(gguf))
