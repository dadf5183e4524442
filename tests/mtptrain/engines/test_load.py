"""Tests that the requests of a load are all answered, that their steps are timed, and that failures are reported."""

import pytest

from eval.loads import Row, spread_ms
from mtptrain.engines.llama_cpp.server import LlamaServer
from mtptrain.engines.load import send
from mtptrain.engines.requests import Answer, EngineCounts, Load, LoadResult, Requests
from mtptrain.engines.server import EngineServer
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.utils.errors import UserError
from tests.mtptrain.engines.fake_server import FakeServer

PROMPTS = [[97, 97, 97, 98, 98, 98, 99], [0x2028, 0x85]]
LOAD = Load("K0", 6, 2)


def requests_of(prompts: list[list[int]]) -> Requests:
    return Requests(prompts, 7, 0.7, 0.9, 20, True, 5)


@pytest.mark.parametrize(("kind", "steps"), [(VllmServer, [2, 7]), (LlamaServer, [1, 3])])
def test_every_request_is_answered_without_a_proxy_and_its_steps_are_counted(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, kind: type[EngineServer], steps: list[int]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    fake.serves("target")
    result = send(kind(fake.url), requests_of(PROMPTS), LOAD)
    assert sorted(answer.num_tokens for answer in result.answers) == [2, 2, 2, 7, 7, 7]
    assert [len(answer.steps_s) for answer in result.answers] == 3 * steps[::-1]
    assert all(0 < answer.steps_s[0] <= answer.steps_s[-1] <= result.duration_s for answer in result.answers)
    assert result.counts == EngineCounts(rounds=18, drafted=36, accepted_at=[12, 0])
    assert sorted(request["seed"] for request in fake.requests) == [5, 6, 7, 8, 9, 10]
    for request in fake.requests:
        assert request["ignore_eos"] and (request["temperature"], request["top_p"], request["top_k"]) == (0.7, 0.9, 20)
        assert {request.get("max_tokens"), request.get("n_predict")} == {7, None}
    if kind is VllmServer:  # no request may hit the cached prefix of another
        assert len({request["cache_salt"] for request in fake.requests}) == 6
    else:
        assert not any(request["cache_prompt"] for request in fake.requests)


def test_a_request_that_fails_is_reported(fake: FakeServer) -> None:
    server, failed = VllmServer(fake.url), r"^serving\.url: the server must answer every request, but one failed"
    for body, why in (
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"choices": []}\n\n', "usage"),
        (b"data: <html>\n\n", "must be JSON"),
    ):
        fake.answers["/v1/completions"] = body
        with pytest.raises(UserError, match=rf"{failed} at concurrency 2: .*{why}"):
            send(server, requests_of(PROMPTS), LOAD)


def test_latencies_are_those_of_requests_and_of_steps() -> None:
    answers = [Answer([0.2, 0.5, 1.0], 5), Answer([0.2, 1.2, 2.2], 6), Answer([0.3], 1)]
    row = Row.of(3, 2, LoadResult(answers, 4.0, None))
    assert (row.requests, row.output_tokens, row.output_tokens_per_s) == (3, 12, 3.0)
    assert row.ttft_ms["p50"] == pytest.approx(200)
    # The times per token after the first are 0.8 s / 4 and 2 s / 5. An answer of one token has no such time.
    assert row.tpot_ms["mean"] == pytest.approx(300) and row.tpot_ms["p50"] == pytest.approx(300)
    assert row.itl_ms["p50"] == pytest.approx(750) and row.itl_ms["mean"] == pytest.approx(700)
    assert spread_ms([]) == dict.fromkeys(("mean", "p50", "p99"), 0.0)
