"""Tests which servers, keys, templates and settings the responses stage refuses."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import check_settings, prepare_responses
from mtptrain.run import Run
from mtptrain.utils.distributed import Ranks
from tests.data_prep.responses.stage import ConfigFor, respond
from tests.data_prep.speaking import EOS, FakeServer, completion


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
            {"models": {"data": []}},
            ["responses.model=other"],
            r"responses\.model: must be one of the models that .* serves \(none\), but is other; correct it",
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
        (
            {"models": b"<html>"},
            [],
            r"^responses\.url: the answer of \S+/models: must be JSON, .*; correct the address$",
        ),
        ({"models": b"[" * 100_000}, [], r"the answer of \S+/models: must be JSON, .* nested too deep"),
        ({"models": b"9" * 5_000}, [], r"the answer of \S+/models: must be JSON, .*5000 digits"),
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


def test_a_server_that_does_not_complete_token_ids_is_refused(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_server_is_asked_by_one_process(by_server: ConfigFor) -> None:
    with pytest.raises(ValueError, match=r"responses\.url: must be used by one process, but there are 2 ranks"):
        prepare_responses(Run(by_server()), Ranks(rank=0, world_size=2, local_rank=0))


def test_answers_that_prompts_would_ignore_give_a_warning_on_the_first_rank(by_server: ConfigFor) -> None:
    config = by_server("prompts.source=conversations", "responses.url=null")
    message = r"^prompts\.source: should be responses, but is conversations, with which mtptrain prompts ignores the"
    with pytest.warns(UserWarning, match=message):
        check_settings(config, Ranks(rank=0, world_size=2, local_rank=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_settings(config, Ranks(rank=1, world_size=2, local_rank=1))
        check_settings(by_server("responses.url=null"), Ranks(rank=0, world_size=2, local_rank=0))


def test_a_path_that_is_named_twice_is_refused(by_server: ConfigFor, server: FakeServer, tmp_path: Path) -> None:
    twice = f"prompts.paths=[{tmp_path}/chats.jsonl,{tmp_path}/chats.jsonl]"
    for prepare in (respond, lambda config: prepare_prompts(Run(config))):
        with pytest.raises(
            ValueError, match=r"prompts\.paths: must name each path once, but names \S+chats\.jsonl more than once"
        ):
            prepare(by_server(twice))
    assert not server.requests
