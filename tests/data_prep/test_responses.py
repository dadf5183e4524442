"""Tests responses of the target, from a server and from transformers."""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.prompts import prepare_prompts
from data_prep.responses import server as completion_server
from data_prep.responses.__main__ import prepare_responses
from data_prep.responses.manifest import ResponsesManifest
from mtptrain.config import PipelineConfig
from mtptrain.data import chat_template
from mtptrain.data.chat_template import render_prompt
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split, is_held_out
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import Ranks
from tests.conftest import GENERATION_TEMPLATE, make_config, program_command, run_program
from tests.data_prep.speaking import EOS, FakeServer, answer_by_prompt, completion, fake_server, make_speaking_target
from tests.data_prep.test_renderings import QWEN3, QWEN3_BLOCKS

ROOT = Path(__file__).parents[2]
ONE_RANK = Ranks(rank=0, world_size=1, local_rank=0)
RUN_FILES = ("config.yaml", "provenance.json")
"""Files that record how the program was called."""

ConfigFor = Callable[..., PipelineConfig]


def chat(name: str, num_turns: int, system: str = "") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in range(num_turns):
        messages += [
            {"role": "user", "content": f"question {turn} of {name}"},
            {"role": "assistant", "content": f"old answer {turn}"},
        ]
    return {"id": name, "messages": messages}


PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHATS = [chat(f"chat{i}", 1 + i % 3, "be brief" if i % 4 == 0 else "") for i in range(20)]


@pytest.fixture(scope="session")
def speaking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking_target(tmp_path_factory.mktemp("speaking"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes retries immediate, and restores the number of threads."""
    monkeypatch.setattr(completion_server, "BACKOFF_S", 0.01)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def overrides_for(tmp_path: Path, target: Path, rows: list[dict[str, Any]], run: str = "run") -> list[str]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"run_dir={tmp_path}/{run}",
        f"target.path={target}",
        "prompts.source=responses",
        f"prompts.paths=[{path}]",
        "prompts.validation_fraction=0.3",
        "responses.max_new_tokens=24",
        "responses.dtype=float32",
    ]


@pytest.fixture
def configure(tmp_path: Path, speaking_target: Path) -> ConfigFor:
    """Returns a function that makes a config for a jsonl file of the given rows."""

    def build(*overrides: str, rows: list[dict[str, Any]] = CHATS, run: str = "run") -> PipelineConfig:
        return make_config(*overrides_for(tmp_path, speaking_target, rows, run), *overrides)

    return build


@pytest.fixture
def by_server(configure: ConfigFor, server: FakeServer) -> ConfigFor:
    return lambda *overrides, **more: configure(f"responses.url={server.url}", *overrides, **more)


def respond(config: PipelineConfig) -> ResponsesManifest:
    manifest = prepare_responses(config, ONE_RANK)
    assert manifest is not None
    return manifest


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(config: PipelineConfig) -> list[dict[str, Any]]:
    return read_lines(config.stage_dir("responses") / "conversations.jsonl")


def failures(config: PipelineConfig) -> list[dict[str, Any]]:
    return read_lines(config.stage_dir("responses") / "failures.jsonl")


def output(config: PipelineConfig) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in config.stage_dir("responses").iterdir() if path.name not in RUN_FILES
    }


def answers_of(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def answer_by_question(table: dict[str, Callable[[list[int]], Any]], target: Path) -> Callable[[dict[str, Any]], Any]:
    """Returns a server behaviour that depends on a word in the last user turn; `answer_by_prompt` by default."""
    tokenizer = load_tokenizer(target)

    def behave(request: dict[str, Any]) -> Any:
        question = tokenizer.decode(request["prompt"]).rsplit("<user>", 1)[-1]
        found = next((make for word, make in table.items() if word in question), None)
        return answer_by_prompt(request) if found is None else found(request["prompt"])

    return behave


# Requests, and the responses that are stored


def test_every_answer_is_new_and_new_answers_are_the_history_of_later_turns(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    config, tokenizer = by_server(), load_tokenizer(speaking_target)
    manifest = respond(config)
    asked = {tuple(request["prompt"]) for request in server.requests}
    assert len(asked) == len(server.requests) == manifest.counts.answers == sum(1 + i % 3 for i in range(20))
    for row, old in zip(answered(config), CHATS, strict=True):
        assert row["id"] == old["id"] and row["ended_by"] == "complete"
        kept = [message for message in row["messages"] if message["role"] != "assistant"]
        assert kept == [message for message in old["messages"] if message["role"] != "assistant"]
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompt = render_prompt(tokenizer, row["messages"][:index])
                asked.remove(tuple(prompt))
                (new_tokens,) = [answer_by_prompt({"prompt": prompt})[1]["choices"][0]["token_ids"]]
                assert message["content"] == tokenizer.decode(new_tokens[:-1])
    assert not asked
    assert "old answer" not in json.dumps(answered(config))


def test_requests_carry_the_sampling_settings_and_a_seed_of_their_own_row_and_turn(
    by_server: ConfigFor, server: FakeServer
) -> None:
    settings = ("responses.temperature=0.7", "responses.top_p=0.9", "responses.top_k=40", "seed=5")
    manifest = respond(by_server(*settings))
    seeds = {tuple(request["prompt"]): request["seed"] for request in server.requests}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds.values())
    for request in server.requests:
        assert (request["temperature"], request["top_p"], request["top_k"], request["max_tokens"]) == (0.7, 0.9, 40, 24)
        assert (request["repetition_penalty"], request["min_p"], request["stop_token_ids"]) == (1.0, 0.0, [EOS])
    assert manifest.identity.settings["responses.temperature"] == 0.7 and manifest.identity.settings["seed"] == 5
    assert manifest.identity.model == "tiny" and manifest.server_versions == ["vLLM 0.0.1"]

    server.requests.clear()
    respond(by_server(*settings, "responses.concurrency=1", run="again"))
    assert {tuple(request["prompt"]): request["seed"] for request in server.requests} == seeds
    respond(by_server(run="greedy"))
    assert server.requests[-1]["top_k"] == -1, "all tokens, in the words of both engines"


def test_a_question_that_nobody_has_answered_is_answered_too(by_server: ConfigFor) -> None:
    rows = [{"id": "q", "messages": [{"role": "user", "content": "why?"}]}]
    config = by_server(rows=rows)
    respond(config)
    assert len(answers_of(answered(config)[0])) == 1


def test_the_order_in_which_conversations_end_changes_nothing(by_server: ConfigFor, server: FakeServer) -> None:
    respond(by_server("responses.concurrency=1", run="one"))

    def late(request: dict[str, Any]) -> Any:
        time.sleep(random.random() / 50)
        return answer_by_prompt(request)

    server.behave = late
    respond(by_server("responses.concurrency=8", run="many"))
    assert output(by_server(run="one")) == output(by_server(run="many"))


def test_no_more_conversations_are_in_flight_than_allowed(by_server: ConfigFor, server: FakeServer) -> None:
    server.delay_s = 0.03
    respond(by_server("responses.concurrency=3"))
    assert server.at_once == 3


def test_a_server_that_returns_only_text_is_enough(by_server: ConfigFor, server: FakeServer) -> None:
    respond(by_server(run="ids"))

    def in_text(request: dict[str, Any]) -> Any:
        status, content = answer_by_prompt(request)
        token_ids = content["choices"][0].pop("token_ids")[:-1]
        content["choices"][0]["text"] = "".join(chr(ord("!") + token) for token in token_ids)
        return status, content

    server.behave = in_text
    respond(by_server(run="text"))
    assert output(by_server(run="ids")) == output(by_server(run="text"))


def test_cut_empty_and_too_long_conversations_end_there_and_are_counted(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {
        "1 of cut": lambda prompt: completion(prompt, [5] * 24, "length"),
        "1 of empty": lambda prompt: completion(prompt, [EOS]),
        "0 of mute": lambda prompt: completion(prompt, [EOS]),
    }
    server.behave = answer_by_question(table, speaking_target)
    long = chat("long", 3)
    long["messages"][2]["content"] = "x" * 475  # a prompt of less than 512 tokens, but no room for 24 more
    config = by_server(rows=[chat("cut", 3), chat("empty", 3), chat("mute", 2), long, chat("whole", 3)])
    manifest = respond(config)
    rows = {row["id"]: row for row in answered(config)}
    assert [message["role"] for message in rows["cut"]["messages"]] == ["user", "assistant"] * 2
    assert rows["cut"]["finish_reasons"] == ["stop", "length"] and rows["cut"]["ended_by"] == "length"
    assert [len(rows[name]["messages"]) for name in ("empty", "mute", "long", "whole")] == [2, 1, 2, 6]
    assert manifest.counts.ended_by == {"complete": 1, "length": 1, "empty": 2, "context": 1, "template": 0}
    assert manifest.counts.unanswered == 1 and manifest.failed == 0
    assert {(Path(item["place"]).name, item["reason"], item["answers"]) for item in failures(config)} == {
        ("chats.jsonl:2", "the target's response is empty", 1),
        ("chats.jsonl:3", "the target's response is empty", 0),
        ("chats.jsonl:4", "the prompt plus responses.max_new_tokens exceeds the context", 1),
    }
    printed = capsys.readouterr().out
    assert "1 responses, each the last of its" in printed
    assert re.search(
        r"empty response +│ 2 conv[^│]*│\n│ prompt too long +│ 1 conv[^│]*│\n│ refused by template +│ 0 conv",
        printed,
    )

    num_requests = len(server.requests)
    respond(config)
    assert len(server.requests) == num_requests, "conversations that ended early are not retried"
    assert "responses is finished already" in capsys.readouterr().out


def test_rows_that_cannot_be_answered_are_refused_with_the_reason(
    by_server: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        chat("good", 1),
        {"id": "a", "messages": [{"role": "system", "content": "be brief"}]},
        {"id": "b", "messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]},
        {"id": "c", "messages": [{"role": "nobody", "content": "hello"}]},
    ]
    config = by_server(rows=rows)
    assert respond(config).refused == 3
    reasons = {Path(item["place"]).name: item["reason"] for item in failures(config)}
    assert reasons == {
        "chats.jsonl:2": "no user or tool message",
        "chats.jsonl:3": "a response that would not follow a user or tool message",
        "chats.jsonl:4": "unknown role 'nobody'",
    }
    assert "1 left out: no user or tool message; first: " in capsys.readouterr().out
    assert [row["id"] for row in answered(config)] == ["good"]
    with pytest.raises(
        ValueError,
        match=r"prompts\.paths: must hold at least one conversation that .* \(1 refused: no user or tool message\); ",
    ):
        respond(by_server(rows=rows[1:2], run="none"))


def test_answers_that_are_not_rendered_as_they_were_generated_are_counted(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    strip = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}" + PROMPT
    target = make_speaking_target(tmp_path / "strips", chat_template=strip)
    tokenizer = load_tokenizer(target)
    space, half = tokenizer(" x")["input_ids"], tokenizer("é")["input_ids"][:1]
    table = {
        "of space": lambda prompt: completion(prompt, [*space, EOS]),
        "of half": lambda prompt: completion(prompt, [5, *half, EOS]),
    }
    server.behave = answer_by_question(table, target)
    config = by_server(f"target.path={target}", rows=[chat("space", 1), chat("half", 1), chat("plain", 1)])
    counts = respond(config).counts
    assert (counts.answers, counts.texts_changed, counts.tokens_changed) == (3, 1, 1)
    assert [(row["texts_kept"], row["tokens_changed"]) for row in answered(config)] == [
        ([False], 0),
        ([True], 1),
        ([True], 0),
    ]


HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
FOOT = "{% else %}<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
THINKING = {
    "in the message": HEAD + "<assistant>{{ m.content }}<|end|>" + FOOT,
    "by the template": HEAD
    + "<assistant>{% if '</think>' in m.content %}<think>{% endif %}{{ m.content }}<|end|>"
    + FOOT,
}


@pytest.mark.parametrize("rendered", THINKING)
def test_a_template_that_begins_the_thought_in_its_prompt_gets_the_answer_back_token_by_token(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, rendered: str
) -> None:
    template = THINKING[rendered] + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    target = make_speaking_target(tmp_path / "thinks", chat_template=template)
    tokenizer = load_tokenizer(target)
    answer = [*tokenizer("hmm</think>yes")["input_ids"], EOS]
    server.behave = lambda request: completion(request["prompt"], answer)
    config = by_server(f"target.path={target}", rows=[chat("one", 1)])
    counts = respond(config).counts
    assert (counts.texts_changed, counts.tokens_changed) == (0, 0)
    messages = answered(config)[0]["messages"]
    assert messages[1]["content"] == ("<think>" if rendered == "in the message" else "") + "hmm</think>yes"
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert whole == [*render_prompt(tokenizer, messages[:1]), *answer]


# Failures and retries


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
    }
    server.behave, config = answer_by_question(table, speaking_target), by_server("responses.max_retries=2")
    server.requests.clear()
    capsys.readouterr()
    assert respond(config).failed == 10
    reasons = {int(item["place"].rsplit(":", 1)[1]) - 1: item["reason"] for item in failures(config)}
    assert reasons[3] == 'the server answers 500: {"error": "out of memory"}'
    assert reasons[4] == 'the server answers 400: {"error": "no"}'
    assert reasons[5].startswith("the server's answer is not JSON")
    assert reasons[6] == "the server ended the response with finish_reason 'abort'"
    assert reasons[7].startswith("the server's answer is not a completion (ValueError")
    assert reasons[8].startswith(
        "the server's answer is not a completion (TypeError: text must be a string and token_ids integers)"
    )
    assert all("not a completion (ValueError: token_ids must be in [0, " in reasons[row] for row in (9, 10))
    assert "not a completion (UnicodeEncodeError: " in reasons[11]
    assert reasons[12] == "the server does not answer: connect(): port must be 0-65535."
    tokenizer = load_tokenizer(speaking_target)
    asked = Counter(
        word
        for r in server.requests
        for word in tokenizer.decode(r["prompt"]).replace("<", " ").split()
        if "chat" in word
    )
    assert (asked["chat3"], asked["chat4"], asked["chat5"]) == (3, 1, 3), "bad requests are not repeated"
    printed = capsys.readouterr().out
    assert "10 conversations, retried" in printed and "1 left out: the server answers 500" in printed
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
    with pytest.raises(RuntimeError, match="at least one conversation must get a response"):
        respond(config)
    assert [item["reason"] for item in failures(config)] == ["the server does not answer: timed out"]


def test_a_response_that_is_too_long_is_not_read_to_its_end(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_server, "MAX_BODY_BYTES", 10_000)
    server.behave = lambda request: (200, drip(b" " * 1000, 0.0))
    config = by_server(rows=CHATS[:1])
    with pytest.raises(RuntimeError, match="at least one conversation must get a response"):
        respond(config)
    assert [item["reason"] for item in failures(config)] == ["the server's answer is longer than 10,000 bytes"]
    assert len(server.requests) == 1, "no retries"


def test_a_server_that_is_gone_stops_the_run_which_then_goes_on(by_server: ConfigFor, server: FakeServer) -> None:
    rows = [chat(f"chat{i}", 1) for i in range(60)]
    respond(by_server(rows=rows, run="undisturbed"))
    server.requests.clear()
    numbers = count(1)

    def dies(request: dict[str, Any]) -> Any:
        return answer_by_prompt(request) if next(numbers) <= 10 else (503, b"")

    server.behave, config = dies, by_server("responses.concurrency=2", "responses.max_retries=0", rows=rows)
    with pytest.raises(
        RuntimeError, match=r"16 consecutive conversations failed, the last one because the server answers 503: Service"
    ):
        respond(config)
    assert len(server.requests) < 30
    with pytest.raises(FileNotFoundError, match=r"manifest\.json: must exist, but does not; run data_prep\.responses"):
        prepare_prompts(config)
    server.requests.clear()
    server.behave = answer_by_prompt
    respond(config)
    assert len(server.requests) == 50
    assert output(config) == output(by_server(rows=rows, run="undisturbed"))


def test_where_nothing_is_answered_the_run_fails(by_server: ConfigFor, server: FakeServer) -> None:
    server.behave = lambda request: (500, b"")
    config = by_server("responses.max_retries=0", rows=CHATS[:3])
    with pytest.raises(
        RuntimeError, match=r"at least one conversation must get a response, but none did; see failures\.jsonl"
    ):
        respond(config)
    assert len(failures(config)) == 3


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        (
            {},
            ["responses.url=http://127.0.0.1:9/v1"],
            r"responses\.url: must be a running server, but http://127\.0\.0\.1:9/v1/models",
        ),
        (
            {},
            ["responses.model=other"],
            r"responses\.model: must be one of the models that .* serves \(tiny\), but is other; correct it",
        ),
        (
            {"models": {"data": [{"id": "a"}, {"id": "b"}]}},
            [],
            r"responses\.model: must be set unless the server has exactly one model, but .* serves a, b; set",
        ),
        (
            {"models": {"hello": 1}},
            [],
            r"base URL of an OpenAI-compatible server, .* answers \{\"hello\": 1\}; correct the address",
        ),
        *(
            (
                {"models": {"data": models}},
                [],
                r"base URL of an OpenAI-compatible server, .* answers \{\"data\".*; correct",
            )
            for models in (
                [{"id": 1}, {"id": 2}],
                *([{"id": "tiny", "max_model_len": length}] for length in ("512", [1], -5, float("inf"), True)),
            )
        ),
        *(
            (
                {},
                [f"responses.url={url}"],
                rf"responses\.url: must be a running server, but {url}/models does not answer",
            )
            for url in ("http://127.0.0.1:99999", f"http://{'a' * 64}")
        ),
        ({"models": b"<html>"}, [], r"must be an OpenAI-compatible server, but the answer of .*/models cannot be read"),
        ({"models": b"[" * 100_000}, [], r"the answer of .*/models cannot be read as JSON \(.* nested too deep"),
        ({"models": b"9" * 5_000}, [], r"the answer of .*/models cannot be read as JSON \(.*5000 digits"),
        (
            {"key": "secret"},
            [],
            r"at .*/models the server answers 401: .*; set the .* variable that responses\.api_key_variable names",
        ),
        (
            {},
            ["prompts.source=text_files"],
            r"prompts\.source: must be responses to generate responses, but is text_files",
        ),
        (
            {},
            ["prompts.paths=[]"],
            r"prompts\.paths: must name at least one file or data set of conversations, but is empty",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(
    by_server: ConfigFor, server: FakeServer, change: dict[str, Any], overrides: list[str], message: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises((ValueError, ConnectionError), match=message):
        respond(by_server(*overrides))
    assert not server.requests and not by_server().stage_dir("responses").exists()


def test_a_server_that_reads_other_tokens_is_refused(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.data_prep.speaking.answer_by_prompt", lambda request: completion([1, *request["prompt"]], [1, EOS])
    )
    with pytest.raises(ValueError, match=r"must read a prompt of 23 token ids unchanged, but counts 24 tokens"):
        respond(by_server())
    monkeypatch.setattr("tests.data_prep.speaking.answer_by_prompt", lambda request: (200, {"object": "error"}))
    with pytest.raises(
        ValueError,
        match=r"must complete prompts given as token ids, but the server's answer is not a completion \(KeyError",
    ):
        respond(by_server())


def test_the_key_is_that_of_the_environment_variable(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    monkeypatch.setenv("SOME_KEY", "secret")
    assert respond(by_server("responses.api_key_variable=SOME_KEY")).failed == 0


@pytest.mark.parametrize("key", ["sécret", "secret\n", " secret"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    by_server: ConfigFor, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ValueError, match=r"^responses\.api_key_variable: SOME_KEY must hold a key of") as failed:
        respond(by_server("responses.api_key_variable=SOME_KEY"))
    assert "cret" not in str(failed.value)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), None, [1]])
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
        return 200, {"choices": [{"text": "", "finish_reason": "stop", "token_ids": [1, EOS]}], "usage": [1]}

    monkeypatch.setattr("tests.data_prep.speaking.answer_by_prompt", without_usage)
    assert respond(by_server(rows=CHATS[:1])).failed == 0


def test_a_template_that_never_ends_from_the_second_turn_is_stopped_before_anything_is_asked(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(9000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"
    template = "{% if messages|length > 2 %}" + loop + "{% endif %}" + GENERATION_TEMPLATE
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.2)
    config = by_server(f"target.path={make_speaking_target(tmp_path / 'slow', chat_template=template)}", rows=CHATS[:2])
    with pytest.raises(chat_template.EndlessTemplate, match=r"must render a conversation within 0\.2 s of CPU time"):
        respond(config)
    assert not server.requests and not config.stage_dir("responses").exists()


def test_a_server_is_asked_by_one_process(by_server: ConfigFor) -> None:
    with pytest.raises(ValueError, match=r"responses\.url: must be used by one process, but there are 2 ranks"):
        prepare_responses(by_server(), Ranks(rank=0, world_size=2, local_rank=0))


def test_the_program_fails_where_conversations_failed_and_prompts_say_how_many_are_missing(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behave = answer_by_question({"of chat3": lambda prompt: (400, {"error": "no"})}, speaking_target)
    result = run_program(
        "data_prep.responses", *overrides_for(tmp_path, speaking_target, CHATS), f"responses.url={server.url}"
    )
    assert result.returncode == 1 and "1 conversations failed; run data_prep.responses again" in result.stderr
    config = by_server()
    assert len(answered(config)) == 19
    prepare_prompts(config)
    assert "responses: 1 conversations failed and are missing; run data_prep.responses again" in capsys.readouterr().out


def test_a_path_that_is_named_twice_is_refused(by_server: ConfigFor, server: FakeServer, tmp_path: Path) -> None:
    twice = f"prompts.paths=[{tmp_path}/chats.jsonl,{tmp_path}/chats.jsonl]"
    for prepare in (respond, prepare_prompts):
        with pytest.raises(
            ValueError, match=r"prompts\.paths: must name each path once, but names \S+chats\.jsonl more than once"
        ):
            prepare(by_server(twice))
    assert not server.requests


# Interruptions


def test_an_interrupt_asks_nothing_more_and_keeps_what_ends_with_the_requests_on_their_way(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    rows, tokenizer = [chat(f"chat{i}", 1 + i % 2 * 3) for i in range(20)], load_tokenizer(speaking_target)
    respond(by_server(rows=rows, run="undisturbed"))
    server.requests.clear()
    numbers = count(1)

    def interrupted(request: dict[str, Any]) -> Any:
        if next(numbers) == 10:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        return answer_by_prompt(request)

    server.behave, config = interrupted, by_server("responses.concurrency=4", rows=rows)
    with pytest.raises(KeyboardInterrupt):
        respond(config)
    assert 10 <= len(server.requests) <= 13, "those on their way, at most four"
    asked = Counter(
        re.findall(r"of (chat\d+)", str(tokenizer.decode(request["prompt"])))[-1] for request in server.requests
    )
    saved = read_lines(config.stage_dir("responses") / "answers_00000.jsonl")
    assert {row["id"] for row in saved} == {row["id"] for row in rows if asked[row["id"]] == len(row["messages"]) // 2}
    assert len(saved) < len(asked)

    server.behave = answer_by_prompt
    server.requests.clear()
    respond(config)
    assert len(server.requests) == 50 - sum(len(row["answer_tokens"]) for row in saved)
    assert output(config) == output(by_server(rows=rows, run="undisturbed"))


def test_an_interrupt_ends_the_waiting_between_two_tries(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_server, "BACKOFF_S", 600.0)
    monkeypatch.setattr(completion_server, "MAX_BACKOFF_S", 600.0)

    def busy(request: dict[str, Any]) -> Any:
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        return 503, b""

    server.behave = busy
    with pytest.raises(KeyboardInterrupt):
        respond(by_server("responses.concurrency=1"))
    assert len(server.requests) == 1


def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, speaking_target: Path
) -> None:
    rows = [chat(f"chat{i}", 1 + i % 3) for i in range(40)]
    undisturbed = by_server(rows=rows, run="undisturbed")
    respond(undisturbed)
    server.delay_s = 0.02
    overrides = [
        *overrides_for(tmp_path, speaking_target, rows),
        f"responses.url={server.url}",
        "responses.concurrency=4",
    ]
    journal = tmp_path / "run/responses/answers_00000.jsonl"
    process = subprocess.Popen(
        program_command("data_prep.responses", *overrides),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 8):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run/responses/manifest.json").exists()
    done = {json.loads(line)["id"] for line in journal.read_bytes().split(b"\n")[:-1]}
    assert 8 <= len(done) < 40

    server.settle()
    server.requests.clear()
    server.delay_s = 0.0
    result = run_program("data_prep.responses", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{40 - len(done)} conversations, " in result.stdout
    asked = [load_tokenizer(speaking_target).decode(request["prompt"]) for request in server.requests]
    assert len(asked) == sum(len(row["messages"]) // 2 for row in rows if row["id"] not in done)
    assert output(by_server(rows=rows)) == output(undisturbed)


def test_a_torn_last_line_is_answered_again(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond(by_server(run="undisturbed"))
    config = by_server()
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.responses.store.ResponsesStore.finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            respond(config)
    journal = config.stage_dir("responses") / "answers_00000.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    torn = json.loads(journal.read_bytes().splitlines()[-2])
    assert torn
    server.requests.clear()
    respond(config)
    assert 1 <= len(server.requests) <= 3
    assert output(config) == output(by_server(run="undisturbed"))


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["responses.temperature=0.5"], r"responses\.temperature must be 0\.5, but is 0\.0"),
        (
            ["responses.max_new_tokens=23", "seed=1"],
            r"responses\.max_new_tokens must be 23, but is 24; seed must be 1, but is 0",
        ),
        (["responses.url=null"], r"the backend \(responses\.url\) must be transformers, but is server"),
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_other_settings_do_not_go_on_with_these_answers(
    by_server: ConfigFor, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str, is_finished: bool
) -> None:
    with monkeypatch.context() as patch:
        if not is_finished:
            patch.setattr("data_prep.responses.store.ResponsesStore.finish", interrupt)
        try:
            respond(by_server())
        except KeyboardInterrupt:
            assert not is_finished
    before = output(by_server())
    with pytest.raises(ValueError, match=message):
        respond(by_server(*overrides))
    assert output(by_server()) == before


def test_other_data_or_another_target_does_not_go_on_with_these_answers(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    respond(by_server())
    with pytest.raises(
        ValueError, match=r"the conversations \(prompts\.paths and their hashes\) must be \{.*\}, but is \{.*\}"
    ):
        respond(by_server(rows=CHATS[1:]))
    other = make_speaking_target(tmp_path / "other", seed=1)
    with pytest.raises(
        ValueError,
        match=r"the hash of the target's weights must be \w+, but is \w+ \(target expected: .*/other, found: ",
    ):
        respond(by_server(f"target.path={other}"))
    server.models = {"data": [{"id": "tuned", "max_model_len": 512}]}
    with pytest.raises(
        ValueError, match=r"the served model \(responses\.model\) must be tuned, but is tiny .*; undo the change"
    ):
        respond(by_server())


# With transformers


def test_transformers_answers_greedily_as_one_prompt_at_a_time_would(
    configure: ConfigFor, speaking_target: Path
) -> None:
    config = configure()
    respond(config)
    model = AutoModelForCausalLM.from_pretrained(speaking_target, dtype=torch.float32).eval()
    tokenizer, num_checked = load_tokenizer(speaking_target), Counter[str]()
    for row in answered(config):
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            tokens = render_prompt(tokenizer, row["messages"][:index])
            start = len(tokens)
            with torch.no_grad():
                while len(tokens) < start + 24 and (len(tokens) == start or tokens[-1] != EOS):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            reason = row["finish_reasons"][num_checked[row["id"]]]
            assert row["answer_tokens"][num_checked[row["id"]]] == len(tokens) - start
            assert reason == ("stop" if tokens[-1] == EOS else "length")
            assert message["content"] == tokenizer.decode(tokens[start : None if reason == "length" else -1])
            num_checked[row["id"]] += 1
    assert num_checked.total() > 20 and {row["ended_by"] for row in answered(config)} >= {"length", "complete"}


def test_ranks_and_interruptions_change_no_byte(configure: ConfigFor, tmp_path: Path, speaking_target: Path) -> None:
    sampled = ("responses.temperature=0.8", "responses.top_k=20", "responses.batch_size=3")
    undisturbed = configure(*sampled, run="undisturbed")
    respond(undisturbed)
    overrides = [*overrides_for(tmp_path, speaking_target, CHATS), *sampled]
    result = run_program("data_prep.responses", *overrides, num_ranks=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert output(configure()) == output(undisturbed)

    # A killed run: some rows of a batch are in the journal of one rank, others in none.
    directory = configure().stage_dir("responses")
    manifest = json.loads((directory / "manifest.json").read_text())
    lines = (directory / "conversations.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("manifest.json", "conversations.jsonl", "failures.jsonl"):
        (directory / name).unlink(missing_ok=True)
    (directory / "plan.json").write_text(json.dumps({"identity": manifest["identity"], "server_versions": []}))
    (directory / "answers_00000.jsonl").write_bytes(lines[7] + lines[2])
    (directory / "answers_00005.jsonl").write_bytes(lines[11] + lines[3][:20])
    respond(configure(*sampled))
    assert output(configure()) == output(undisturbed)


def test_sampling_follows_its_settings_and_its_seed(configure: ConfigFor) -> None:
    respond(configure(run="greedy"))
    greedy = [row["messages"] for row in answered(configure(run="greedy"))]
    texts = {}
    for run, overrides in {
        "hot": ["responses.temperature=1.0"],
        "again": ["responses.temperature=1.0"],
        "seed": ["responses.temperature=1.0", "seed=1"],
        "top_k": ["responses.temperature=1.0", "responses.top_k=1"],
        "top_p": ["responses.temperature=1.0", "responses.top_p=1e-6"],
    }.items():
        respond(configure(*overrides, run=run))
        texts[run] = [row["messages"] for row in answered(configure(run=run))]
    assert texts["hot"] == texts["again"] != texts["seed"]
    assert texts["hot"] != greedy == texts["top_k"] == texts["top_p"]


def test_penalties_of_the_checkpoint_do_not_touch_the_answers(
    configure: ConfigFor, speaking_target: Path, tmp_path: Path
) -> None:
    respond(configure(run="plain"))
    target = make_speaking_target(tmp_path / "penalised")
    settings = {"eos_token_id": [EOS], "repetition_penalty": 1.8, "do_sample": True, "temperature": 3.0}
    (target / "generation_config.json").write_text(json.dumps(settings))
    respond(configure(f"target.path={target}", run="penalised"))
    assert answered(configure(run="penalised")) == answered(configure(run="plain"))


def test_a_target_without_an_end_of_answer_is_refused(configure: ConfigFor, tmp_path: Path) -> None:
    target = make_speaking_target(tmp_path / "endless", eos_token_id=None)
    with pytest.raises(
        ValueError, match=r"target\.path: eos_token_id must be set in generation_config\.json or config\.json"
    ):
        respond(configure(f"target.path={target}"))


# Prompts from responses


def test_the_prompts_supervise_exactly_what_the_target_generated(configure: ConfigFor, speaking_target: Path) -> None:
    config = configure("responses.max_new_tokens=16")
    manifest = respond(config)
    assert manifest.counts.texts_changed == manifest.counts.tokens_changed == 0
    prepare_prompts(config)
    entries = DocumentEntry.read_all(config.stage_dir("prompts"))
    supervised: dict[str, list[int]] = {}
    for split in Split:
        documents = Documents.load(config.stage_dir("prompts") / f"{split}.safetensors")
        for i, document_id in enumerate(documents.document_ids.tolist()):
            name, mask = entries[document_id].name, documents.mask(i).astype(bool)
            supervised.setdefault(name, []).extend(documents.tokens(i)[mask].tolist())
            assert is_held_out(entries[document_id].group, 0.3) == (split is Split.validation)
    tokenizer, ends = load_tokenizer(speaking_target), Counter[str]()
    rows = [row for row in answered(config) if answers_of(row)]
    assert supervised.keys() == {row["id"] for row in rows}
    for row in rows:
        generated: list[int] = []
        for answer, reason in zip(answers_of(row), row["finish_reasons"], strict=True):
            generated += [*tokenizer(answer)["input_ids"], *([EOS] if reason == "stop" else [])]
            ends[reason] += 1
        assert supervised[row["id"]] == generated
        assert sum(row["answer_tokens"]) == len(generated)
    assert ends["stop"] > 5 and ends["length"] > 3


def test_answers_to_one_question_are_on_one_side_whatever_was_answered_before(by_server: ConfigFor) -> None:
    """Rows without an id are named by all their messages, so the replaced answers could decide their split."""
    rows = []
    for i in range(200):
        question, old = (
            {"role": "user", "content": f"question {i % 20}"},
            {"role": "assistant", "content": f"old answer {i}"},
        )
        rows.append({"messages": [question, old]})
    config = by_server(rows=rows)
    respond(config)
    prepare_prompts(config)
    sides = {split: Documents.load(config.stage_dir("prompts") / f"{split}.safetensors") for split in Split}
    train, held_out = ({documents.tokens(i).tobytes() for i in range(len(documents))} for documents in sides.values())
    assert train and held_out and not train & held_out
    assert len(train | held_out) == 20 == sum(map(len, sides.values()))


def test_prompts_refuse_answers_that_are_missing_or_others(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    config = by_server()
    with pytest.raises(
        FileNotFoundError, match=r"responses/manifest\.json: must exist, but does not; run data_prep\.responses with"
    ):
        prepare_prompts(config)
    respond(config)
    prepare_prompts(config)
    other = make_speaking_target(tmp_path / "other", seed=1, chat_template=GENERATION_TEMPLATE + "{# other #}")
    with pytest.raises(
        ValueError,
        match=r"weights must be \w+, but is \w+; the hash of the chat template must be .*; run data_prep\.responses ag",
    ):
        prepare_prompts(by_server(f"target.path={other}"))
    with pytest.raises(ValueError, match=r"the hash of the conversations of \S+chats\.jsonl must be \w+, but is \w+;"):
        prepare_prompts(by_server(rows=[*CHATS, chat("new", 1)]))
    with pytest.raises(ValueError, match=r"prompts\.paths must be \['/elsewhere'\], but is \["):
        prepare_prompts(by_server("prompts.paths=[/elsewhere]"))


def test_prompts_go_on_with_answers_whose_conversations_are_gone(
    by_server: ConfigFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = by_server()
    respond(config)
    (tmp_path / "chats.jsonl").unlink()
    prepare_prompts(config)
    assert "chats.jsonl cannot be read any more, so the responses cannot be checked" in capsys.readouterr().out


def supervised_texts(config: PipelineConfig, target: Path) -> dict[str, str]:
    """Returns the supervised text of each conversation."""
    tokenizer, entries = load_tokenizer(target), DocumentEntry.read_all(config.stage_dir("prompts"))
    found: dict[str, str] = {}
    for split in Split:
        documents = Documents.load(config.stage_dir("prompts") / f"{split}.safetensors")
        for i, document_id in enumerate(documents.document_ids.tolist()):
            text = tokenizer.decode(documents.tokens(i)[documents.mask(i).astype(bool)])
            found[entries[document_id].name] = found.get(entries[document_id].name, "") + text
    return found


@pytest.mark.parametrize("template", [QWEN3, QWEN3_BLOCKS])
def test_an_answer_that_was_cut_in_its_reasoning_is_not_supervised(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, template: str
) -> None:
    target = make_speaking_target(tmp_path / "thinks", chat_template=template)
    tokenizer = load_tokenizer(target)
    cut, whole = (tokenizer(text)["input_ids"] for text in ("<think>\nI wonder", "<think>\nhmm\n</think>\n\nyes"))
    lost = {"1 of cut": cut, "0 of never": cut}

    def answer(ids: list[int]) -> Callable[[list[int]], Any]:
        return lambda prompt: completion(prompt, ids, "length")

    by_word = answer_by_question({word: answer(ids) for word, ids in lost.items()}, target)
    is_lost = answer_by_question({word: lambda prompt: None for word in lost}, target)
    server.behave = lambda request: (
        by_word(request) if is_lost(request) is None else completion(request["prompt"], [*whole, EOS])
    )
    names = [f"{kind}{i}" for kind in ("cut", "never", "good") for i in range(6)]
    config = by_server(f"target.path={target}", rows=[chat(name, 2) for name in names])
    assert respond(config).counts.texts_changed == 12
    kept = {row["id"]: row["texts_kept"] for row in answered(config)}
    assert (kept["cut0"], kept["never0"], kept["good0"]) == ([True, False], [False], [True, True])
    report = prepare_prompts(config)
    found, one = supervised_texts(config, target), "<think>\nhmm\n</think>\n\nyes<|im_end|>"
    assert {name: text.replace("<|im_end|>\n", "<|im_end|>") for name, text in found.items()} == {
        f"{kind}{i}": one * times for kind, times in (("cut", 1), ("good", 2)) for i in range(6)
    }
    assert report.answers_left_out == 6
    [refused] = report.refused
    assert (refused.count, refused.reason) == (6, "the chat template renders no answer as it was generated")


def test_of_several_answers_those_that_the_template_changes_are_not_supervised(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    strip = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}" + PROMPT
    target = make_speaking_target(tmp_path / "strips", chat_template=strip)
    tokenizer = load_tokenizer(target)
    texts = {"0 of": "one", "1 of": " two", "2 of": "three", "3 of": " four"}
    answers = {word: [*tokenizer(text)["input_ids"], EOS] for word, text in texts.items()}
    server.behave = answer_by_question(
        {word: lambda p, ids=ids: completion(p, ids) for word, ids in answers.items()}, target
    )
    config = by_server(f"target.path={target}", rows=[chat(f"chat{i}", 4) for i in range(8)])
    respond(config)
    report = prepare_prompts(config)
    end = tokenizer.decode([EOS])
    assert set(supervised_texts(config, target).values()) == {f"one{end}three{end}"}
    assert report.answers_left_out == 16


def test_a_character_that_was_cut_is_no_part_of_its_answer(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    tokenizer = load_tokenizer(speaking_target)
    whole, end = tokenizer("ok \U0001f600")["input_ids"], len(tokenizer("ok ")["input_ids"])
    assert len(whole) == end + 4, "one token a byte"
    server.behave = lambda request: completion(request["prompt"], whole[:-2], "length")
    config = by_server(rows=[chat(f"chat{i}", 1) for i in range(8)])
    respond(config)
    assert {answers_of(row)[0] for row in answered(config)} == {"ok "}
    prepare_prompts(config)
    assert set(supervised_texts(config, speaking_target).values()) == {"ok "}
