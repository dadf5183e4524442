"""Tests which server failures are retried, which fail only their own conversation, and which stop the run."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses import transport
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.errors import UserError
from tests.conftest import run_program
from tests.data_prep.responses.stage import (
    CHATS,
    ConfigFor,
    answer_by_question,
    answered,
    chat,
    failures,
    output,
    overrides_for,
    respond,
)
from tests.data_prep.speaking import EOS, FakeServer, answer_by_prompt, completion


def test_a_busy_server_is_retried(by_server: ConfigFor, server: FakeServer) -> None:
    seen: Counter[tuple[int, ...]] = Counter()

    def busy(request: dict[str, Any]) -> Any:
        seen[tuple(request["prompt"])] += 1
        return (429, {"error": "busy"}) if seen[tuple(request["prompt"])] < 3 else answer_by_prompt(request)

    server.behave = busy
    manifest = respond(by_server())
    assert manifest.failed == 0 and set(seen.values()) == {3}


def test_what_keeps_failing_is_counted_named_and_alone_retried(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    respond(by_server(run="undisturbed"))
    table = {
        "of chat3": lambda prompt: (500, {"error": "out of memory"}),
        "of chat4": lambda prompt: (400, {"error": "no"}),
        "of chat5": lambda prompt: (200, b"<html>"),
        "of chat6": lambda prompt: completion(prompt, [1], "abort"),
        "of chat7": lambda prompt: (200, {"choices": []}),
        "of chat8": lambda prompt: completion(prompt, ["a"]),  # type: ignore[list-item]
        "of chat9": lambda prompt: completion(prompt, [5, -1]),
        "of chat10": lambda prompt: completion(prompt, [10**6]),
        "of chat11": lambda prompt: completion(prompt, [5], text="caf\ud83d"),
        "of chat12": lambda prompt: (307, "http://127.0.0.1:99999/"),
        "of chat13": lambda prompt: completion(prompt, [5] * 25),
        "of chat14": lambda prompt: (999, completion(prompt, [5])[1]),
    }
    server.behave, config = answer_by_question(table, speaking_target), by_server("responses.max_retries=2")
    server.requests.clear()
    capsys.readouterr()
    assert respond(config).failed == 12
    reasons = {int(item["place"].rsplit(":", 1)[1]) - 1: item["reason"] for item in failures(config)}
    assert reasons[3] == 'the server answers 500: {"error": "out of memory"}'
    assert reasons[4] == 'the server answers 400: {"error": "no"}'
    assert re.match(r"responses\.url: the answer of \S+/completions: must be JSON, but is not", reasons[5])
    assert reasons[6] == "the server ended the response with finish_reason 'abort'"
    assert reasons[7].startswith("the server's answer is not a completion (ValueError")
    assert reasons[8].startswith(
        "the server's answer is not a completion (TypeError: text must be a string and token_ids integers)"
    )
    assert all("not a completion (ValueError: token_ids must be in [0, " in reasons[row] for row in (9, 10))
    assert "not a completion (UnicodeEncodeError: " in reasons[11]
    assert reasons[12] == "the server does not answer: connect(): port must be 0-65535."
    assert "not a completion (ValueError: the number of tokens must be in [0, 24], but is 25)" in reasons[13]
    assert reasons[14].startswith("the server answers 999: ")
    tokenizer = load_tokenizer(speaking_target)
    asked = Counter(
        word
        for r in server.requests
        for word in tokenizer.decode(r["prompt"]).replace("<", " ").split()
        if "chat" in word
    )
    assert (asked["chat3"], asked["chat4"], asked["chat5"]) == (3, 1, 3), "a 400 must not be retried"
    printed = capsys.readouterr().out
    assert "12 conversations, retried" in printed and "1 left out: the server answers 500" in printed
    assert [row["row"] for row in answered(config)] == [row for row in range(20) if row not in reasons]

    server.behave = answer_by_prompt
    server.requests.clear()
    assert respond(config).failed == 0
    assert len(server.requests) == sum(1 + i % 3 for i in reasons)
    assert output(config) == output(by_server(run="undisturbed"))


def test_a_server_that_hangs_is_left_after_the_timeout(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    def hang(prompt: list[int]) -> Any:
        time.sleep(1.0)
        return completion(prompt, [1, EOS])

    server.behave = answer_by_question({"of chat1<": hang}, speaking_target)
    config = by_server("responses.timeout_s=0.2", "responses.max_retries=1", rows=CHATS[:3])
    assert respond(config).failed == 1
    assert [item["reason"] for item in failures(config)] == ["the server does not answer: timed out"]


def drip(body: bytes, pause_s: float) -> Iterator[bytes]:
    while True:
        yield body
        time.sleep(pause_s)


def test_a_response_that_drips_without_end_is_left_after_the_timeout(by_server: ConfigFor, server: FakeServer) -> None:
    server.behave = lambda request: (200, drip(b" ", 0.05))
    config = by_server("responses.timeout_s=0.5", "responses.max_retries=0", rows=CHATS[:1])
    message = r"at least one conversation must get a response, but none did; see failures\.jsonl"
    with pytest.raises(UserError, match=message):
        respond(config)
    assert [item["reason"] for item in failures(config)] == ["the server does not answer: timed out"]


def test_a_response_that_is_too_long_is_not_read_to_its_end(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 10_000)
    server.behave = lambda request: (200, drip(b" " * 1000, 0.0))
    config = by_server(rows=CHATS[:1])
    with pytest.raises(UserError, match="at least one conversation must get a response"):
        respond(config)
    assert [item["reason"] for item in failures(config)] == ["the server's answer is longer than 10,000 bytes"]
    assert len(server.requests) == 1, "the request must not be repeated"


def test_a_server_that_is_gone_stops_the_run_which_then_goes_on(by_server: ConfigFor, server: FakeServer) -> None:
    rows = [chat(f"chat{i}", 1) for i in range(60)]
    respond(by_server(rows=rows, run="undisturbed"))
    server.requests.clear()
    numbers = count(1)

    def dies(request: dict[str, Any]) -> Any:
        return answer_by_prompt(request) if next(numbers) <= 10 else (503, b"")

    server.behave, config = dies, by_server("responses.concurrency=2", "responses.max_retries=0", rows=rows)
    with pytest.raises(
        UserError,
        match=r"^mtptrain responses: conversations must not keep failing, but 16 in a row did, the last one with: the "
        r"server answers 503: Service",
    ):
        respond(config)
    assert len(server.requests) < 30
    with pytest.raises(UserError, match=r"manifest\.json: must exist, but does not; run mtptrain responses"):
        prepare_prompts(Run(config))
    server.requests.clear()
    server.behave = answer_by_prompt
    respond(config)
    assert len(server.requests) == 50
    assert output(config) == output(by_server(rows=rows, run="undisturbed"))


@pytest.mark.parametrize("number", [float("inf"), float("nan"), None, [1], -5, 1e300, 25])
def test_a_response_with_a_wrong_number_of_tokens_fails_its_conversation(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, number: Any
) -> None:
    def miscounts(prompt: list[int]) -> Any:
        return 200, {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": number}}

    server.behave = answer_by_question({"of chat0": miscounts}, speaking_target)
    config = by_server(rows=CHATS[:2])
    assert respond(config).failed == 1 and len(answered(config)) == 1
    assert "the server's answer is not a completion" in failures(config)[0]["reason"]


def test_a_server_whose_usage_is_no_object_is_used(by_server: ConfigFor, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_usage(request: dict[str, Any]) -> Any:
        return 200, {"choices": [{"text": '"', "finish_reason": "stop", "token_ids": [1, EOS]}], "usage": [1]}

    monkeypatch.setattr("tests.data_prep.speaking.answer_by_prompt", without_usage)
    assert respond(by_server(rows=CHATS[:1])).failed == 0


def test_the_program_fails_where_conversations_failed_and_prompts_say_how_many_are_missing(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behave = answer_by_question({"of chat3": lambda prompt: (400, {"error": "no"})}, speaking_target)
    result = run_program("responses", *overrides_for(tmp_path, speaking_target, CHATS), f"responses.url={server.url}")
    assert result.returncode == 1 and "1 conversations failed; run mtptrain responses again" in result.stderr
    config = by_server()
    assert len(answered(config)) == 19
    prepare_prompts(Run(config))
    assert "responses: 1 conversations failed and are missing; run mtptrain responses again" in capsys.readouterr().out
