"""Tests which servers are refused, which failures are retried, and what a wrong or hostile server can do."""

import json
import re
from base64 import b64encode
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses import regenerate
from data_prep.responses.regenerate import connect, prepare_responses, sampling_of
from data_prep.responses.server import secrets_of
from mtptrain.config import PipelineConfig, PromptSource
from mtptrain.run_dir import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import GENERATION_TEMPLATE
from tests.data_prep.responses.conftest import (
    CHATS,
    ConfigFor,
    answer_by_question,
    answered,
    chat,
    failures,
    read_lines,
    respond,
)
from tests.data_prep.speaking import EOS, FakeServer, answer_by_prompt, completion, make_speaking_target

KEY = "sk-open-sesame-0123456789"
TINY = {"id": "tiny", "max_model_len": 512}
BASE_URL = r"^responses\.url: must be the base URL of a running OpenAI-compatible server, .*, but at \S+/models "
MODEL = r"^responses\.model: must be the target's name on the server"


def refusal(config: PipelineConfig) -> str:
    """Returns the error with which connecting to the server ends."""
    run, settings = Run(config), config.responses
    with pytest.raises(UserError) as refused:
        connect(str(settings.url), settings, sampling_of(settings, run.target, 0), run.target)
    return str(refused.value)


def test_a_server_that_cannot_work_is_refused_by_name(by_server: ConfigFor, server: FakeServer) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"data": [TINY]}, {"model": "other"}, MODEL + r".*, but is other, and \S+/v1 serves tiny; correct it"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, MODEL + ".*, but is None, and .* serves a, b;"),
        ({"hello": 1}, {}, BASE_URL + r'the server answers \{"hello": 1\}; start the server, correct the address'),
        (b"<html>", {}, BASE_URL + "the server's answer: must be JSON, but is not"),
        ({}, {"url": "http://127.0.0.1:9"}, BASE_URL + "the server does not answer: "),
        ({}, {"url": "http://[/v1"}, BASE_URL + "the server does not answer: "),
    ]
    for server.models, settings, message in cases:
        assert re.search(message, refusal(by_server(**settings)))
    server.models, server.query = {"data": [TINY]}, "key=1"
    assert re.search(BASE_URL + "the server answers 401: .* or set .* OPENAI_API_KEY to", refusal(by_server()))


def test_a_server_that_does_not_complete_token_ids_as_the_target_is_refused_before_anything_is_asked(
    by_server: ConfigFor, server: FakeServer
) -> None:
    no_ids = {"text": "a", "finish_reason": "length"}
    checks: dict[str, Any] = {
        r"not a completion \(KeyError": lambda ids: (200, {"object": "error"}),
        "the server answers 400: .*must be a string": lambda ids: (400, {"error": "prompt must be a string"}),
        "'token_ids'.*; serve .* by an engine that knows return_token_ids": lambda ids: (200, {"choices": [no_ids]}),
        r"the text must be that of token_ids .*, but is another\): .*hi": lambda ids: completion(ids, [5], text="hi"),
    }
    for message, check in checks.items():
        server.check = lambda request, check=check: check(request["prompt"])
        with pytest.raises(UserError, match=r"^responses\.url: \S+ must complete prompts given as token.*" + message):
            respond(by_server())
    assert not server.requests and not by_server().stage_dir("responses").exists()


def test_settings_that_do_not_fit_are_refused(by_server: ConfigFor, tmp_path: Path) -> None:
    config = by_server()
    with pytest.raises(UserError, match=r"responses\.url: must be used by one process, but there are 2 ranks"):
        prepare_responses(Run(config), Ranks(rank=0, world_size=2, local_rank=0))
    config.prompts.source = PromptSource.conversations
    with pytest.raises(UserError, match=r"must be responses and at least one .*, but are conversations and \["):
        respond(config)
    target = make_speaking_target(tmp_path / "endless", eos_token_id=None, chat_template="{{ messages[-1].content }} ")
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(UserError, match=r"target\.path: eos_token_id must be set in generation_config\.json or config"):
        respond(by_server(target=target))


def test_responses_are_sampled_and_ended_as_the_target_is_served_unless_settings_say_otherwise(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_speaking_target(tmp_path / "target")
    path = target / "generation_config.json"
    served = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    penalised = neutral | {"temperature": 0.0, "repetition_penalty": 1.05}
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, neutral | {"temperature": 0.0}, "greedy, and generation_config.json of the target says nothing of s"),
        (served, {}, served, "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, .*, as generation_config.json of"),
        (served | {"do_sample": False}, {}, penalised, "greedy, repetition_penalty 1.05, as "),
        ({"do_sample": True, "top_k": 5}, {}, neutral | {"top_k": 5}, "responses: top_k 5, as "),
        (served, {"top_k": 7}, served | {"top_k": 7}, "top_k 7, .*, while temperature 0.6, .* is what generation_conf"),
        (
            served,
            {"temperature": 0.0},
            neutral | {"temperature": 0.0},
            "responses: greedy, while temperature 0.6",
        ),
        (
            {"suppress_tokens": [5]},
            {},
            neutral | {"temperature": 0.0},
            "suppress_tokens .5., which responses leave",
        ),
    ]
    for number, (generation, settings, expected, said) in enumerate(cases):
        path.write_text(json.dumps({"eos_token_id": 3, **generation}))
        server.requests.clear()
        capsys.readouterr()
        respond(by_server(target=target, run=f"case{number}", **settings))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("responses: ")]
        assert re.search(said, "\n".join(lines)) and len(lines) == 1
        for request in server.requests:
            assert {name: request[name] for name in expected} == expected
            assert request["stop_token_ids"] == [3, EOS]  # the second is the tokenizer's
    with pytest.warns(UserWarning, match=r"responses\.url: must not be vLLM: it takes temp.* but not 0\.001"):
        respond(by_server(target=target, run="low", temperature=0.001))


def test_an_answer_ends_where_the_template_ends_a_turn_and_answers_that_are_all_cut_are_warned_of(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = GENERATION_TEMPLATE.replace("<|end|>", "<system>")
    target = make_speaking_target(tmp_path / "target", chat_template=template)
    server.behave = lambda request: completion(request["prompt"], [5, 6], "length")
    turn_end = load_tokenizer(target).convert_tokens_to_ids("<system>")
    with pytest.warns(UserWarning, match=f"servers should end an answer at '<system>', .*; add {turn_end} to eos"):
        respond(by_server(target=target))
    assert all(request["stop_token_ids"] == [EOS, turn_end] for request in server.requests)
    err = capsys.readouterr().err
    assert re.search(r"warning: (\d+) of \1 responses reached responses.max_new_tokens before an end of text", err)


def test_what_keeps_failing_is_counted_named_and_alone_retried(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    respond(by_server(run="undisturbed"))
    seen = Counter[int]()

    def busy(prompt: list[int]) -> Any:
        seen[len(prompt)] += 1
        return (429, {"error": "busy"}) if seen[len(prompt)] < 3 else answer_by_prompt({"prompt": prompt})

    cases: list[tuple[Any, int, str]] = [  # the answer, how often it is asked for, and the reason
        (lambda prompt: (500, {"error": "out of memory"}), 4, 'the server answers 500: {"error": "out of memory"}'),
        (lambda prompt: (307, "http://127.0.0.1:99999/"), 4, "the server does not answer: "),
        (lambda prompt: (200, b"<html>"), 4, "the server's answer: must be JSON, but is not"),
        (lambda prompt: (400, {"error": "no"}), 1, 'the server answers 400: {"error": "no"}'),
        (lambda prompt: completion(prompt, [1], "abort"), 1, "finish_reason must be stop or length, but is abort"),
        (lambda prompt: completion(prompt, [10**6]), 1, "token_ids must be integers in [0, "),
        (lambda prompt: completion(prompt, [5] * 25), 1, "at most 24 tokens must be generated, but are 25"),
        (lambda prompt: completion(prompt, [1, EOS], text=""), 1, "the text must be that of token_ids"),
    ]
    table = {f"of chat{row}<": answer for row, (answer, _, _) in enumerate(cases)} | {"of chat19<": busy}
    for row, shown in enumerate((' "#  ', '"#<|end|>', '"#\ufffd'), 15):  # is text of the token ids
        table[f"of chat{row}<"] = lambda prompt, shown=shown: completion(prompt, [1, 2, EOS], text=shown)
    server.behave, server.requests = answer_by_question(table, speaking_target), []
    config = by_server()
    assert respond(config).failed == len(cases)
    assert all(cases[row][2] in reason for row, reason in failures(config).items())
    tokenizer = load_tokenizer(speaking_target)
    asked = Counter(re.findall(r"0 of chat(\d+)<", "".join(tokenizer.decode(r["prompt"]) for r in server.requests)))
    assert [asked[str(row)] for row in range(len(cases))] == [times for _, times, _ in cases]
    assert set(seen.values()) == {3}, "a busy server is asked until it answers"
    printed = capsys.readouterr().out
    assert "1 left out or ended early: the server answers 500" in printed
    assert [row["row"] for row in answered(config)] == list(range(len(cases), 20))

    server.behave, server.requests = answer_by_prompt, []
    assert respond(config).failed == 0
    assert len(server.requests) == sum(len(CHATS[row]["messages"]) // 2 for row in range(len(cases)))
    rows, whole = answered(config), answered(by_server(run="undisturbed"))
    assert rows[:15] + rows[18:] == whole[:15] + whole[18:]  # three were answered otherwise


def test_a_server_that_is_gone_stops_the_run(by_server: ConfigFor, server: FakeServer) -> None:
    numbers = count(1)
    server.behave = lambda request: answer_by_prompt(request) if next(numbers) <= 10 else (503, b"")
    config = by_server(concurrency=2, rows=[chat(f"chat{i}", 1) for i in range(60)])
    message = r"^mtptrain responses: conversations must not keep failing, but 16 in a row did, the last one with: the s"
    with pytest.raises(UserError, match=message + "erver answers 503: Service"):
        respond(config)
    assert len(server.requests) < 100
    assert len(read_lines(config.stage_dir("responses") / "answers_00000.jsonl")) == 10


def test_failed_conversations_fail_the_program_and_prompts_are_made_of_the_others(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behave = answer_by_question({"of chat3<": lambda prompt: (400, {"error": "no"})}, speaking_target)
    config = by_server()
    with pytest.raises(SystemExit, match="1 conversations failed; run mtptrain responses again") as ended:
        regenerate.main(config)
    assert isinstance(ended.value.code, str), "Python then exits with 1"
    assert len(answered(config)) == 19
    prepare_prompts(Run(config))
    assert "responses: 1 conversations failed and are missing; run mtptrain responses again" in capsys.readouterr().out


BASIC = b64encode(b"me@home:p/ss-word").decode()


@pytest.mark.parametrize("user", ["", "me%40home:p%2Fss-word@"])
def test_secrets_reach_the_server_and_no_message_or_file_even_if_the_server_repeats_them(
    by_server: ConfigFor,
    server: FakeServer,
    speaking_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    user: str,
) -> None:
    of_user = [BASIC, "me%40home", "me@home", "p%2Fss-word", "p/ss-word"]
    secrets = [*(of_user if user else [KEY]), "a%22sesame", 'a"sesame']
    server.query, said = "api=1&key=a%22sesame", " ".join(secrets)
    echoes: list[Any] = [
        lambda prompt: (400, (" " * 190 + said).encode()),
        lambda prompt: (200, {"key": said}),
        lambda prompt: completion(prompt, [1, EOS], reason=said),
        lambda prompt: (307, f"http://{user}127.0.0.1:9/v1?key=a%22sesame"),
    ]
    server.behave = answer_by_question({f"of chat{i}<": echo for i, echo in enumerate(echoes)}, speaking_target)
    server.models = {"data": [TINY, {"id": said}]}
    url = f"{server.url.replace('://', f'://{user}')}?{server.query}"
    shown = f"{server.url.replace('://', '://***@') if user else server.url}?api=***&key=***"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("sys.argv", ["responses", f"responses.url={url}", f"serving.url={url}"])
    config = by_server(url=url, model="tiny")
    config.serving.url = url
    assert respond(config).failed == len(echoes)
    header = f"Basic {BASIC}" if user else f"Bearer {KEY}"
    assert {headers["authorization"] for headers in server.headers} == {header}
    texts = [refusal(by_server(url=url, model="other"))]
    written = [path.read_text() for path in Path(config.run_dir).rglob("*") if path.is_file()]
    captured = capfd.readouterr()
    for text in (*texts, captured.out, captured.err, *written):
        starts = [part for secret in secrets for part in (secret[:6], secret[-6:], json.dumps(secret)[1:7])]
        assert not [start for start in starts if start in text]
    assert sum(shown in text for text in written) == 1 and shown in captured.out


def test_a_password_or_key_that_cannot_be_sent_is_refused_without_showing_it(
    by_server: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("http://me:p/w@h:9/v1", "http://me:1/w@h:9/v1", "http://a#b:c@h/v1", "http://a:b?c@h"):
        with pytest.raises(UserError, match=r"^responses\.url: the user and password must be percent-encod") as failed:
            secrets_of(url, "")
        assert "@" not in str(failed.value)
    for key in ("sécret", "secret\n", " secret"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        shown = refusal(by_server())
        assert shown.startswith("OPENAI_API_KEY: must hold a key of") and "cret" not in shown
