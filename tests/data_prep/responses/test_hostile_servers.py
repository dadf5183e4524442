"""Tests what a server that is wrong or malicious can do: nothing to the memory, the secrets or the data."""

import gzip
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from data_prep.responses import transport
from mtptrain.run_dir import write_provenance
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import hide_home, hide_passwords, hide_secrets
from tests.conftest import make_config
from tests.data_prep.responses.stage import ConfigFor, chat, failures, respond
from tests.data_prep.speaking import EOS, FakeServer, completion, fake_server

KEY = "sk-open-sesame-0123456789"
PASSWORD = "p%2Fss-word"
ONE_CHAT = [chat("one", 1)]


@pytest.mark.parametrize("encoding", ["gzip, gzip", "x-unknown"])
@pytest.mark.parametrize("when", ["at the start", "later", "error"])
def test_a_compressed_answer_is_not_decompressed(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch, encoding: str, when: str
) -> None:
    """64 kB compressed twice with gzip can hold 7 GB."""
    bomb = gzip.compress(gzip.compress(b" " * 10_000_000))

    def behave(request: dict[str, Any]) -> tuple[int, bytes]:
        server.headers = {"Content-Encoding": encoding}
        return 200 if when == "later" else 400, bomb

    if when == "at the start":
        server.models, server.headers = bomb, {"Content-Encoding": encoding}
    server.behave = behave
    with pytest.raises((ValueError, RuntimeError)) as failed:
        respond(by_server("responses.max_retries=0", rows=ONE_CHAT))
    reason = str(failed.value) if when == "at the start" else failures(by_server())[0]["reason"]
    assert f"must not be compressed, but has Content-Encoding {encoding}" in reason
    assert {headers["accept-encoding"] for headers in server.asked} == {"identity"}


ECHOES = {
    "401": lambda seen: (401, {"error": f"wrong key {seen}"}),
    "text": lambda seen: (500, seen.encode()),
    "cut off": lambda seen: (400, (" " * (190 - len("Bearer ")) + seen).encode()),
    "again and again": lambda seen: (400, (seen * 3000).encode()),
    "not JSON": lambda seen: (200, seen.encode()),
    "no completion": lambda seen: (200, {"key": seen}),
    "unknown reason": lambda seen: completion([1], [1, EOS], reason=seen),
}


@pytest.mark.parametrize("case", ECHOES)
@pytest.mark.parametrize("is_password", [False, True], ids=["key", "password"])
def test_a_secret_that_the_server_repeats_is_not_shown(
    by_server: ConfigFor,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    case: str,
    is_password: bool,
) -> None:
    url = server.url.replace("://", f"://me:{PASSWORD}@") if is_password else server.url
    monkeypatch.setenv("SOME_KEY", "" if is_password else KEY)
    secrets = [PASSWORD, "p/ss-word", b64encode(b"me:p/ss-word").decode()] if is_password else [KEY]
    server.behave = lambda request: ECHOES[case](server.asked[-1]["authorization"] + "".join(secrets))
    config = by_server("responses.api_key_variable=SOME_KEY", "responses.max_retries=0", f"responses.url={url}")
    with pytest.raises(UserError) as failed:
        respond(config)
    written = [path.read_text() for path in config.stage_dir("responses").iterdir()]
    captured = capfd.readouterr()
    for text in (str(failed.value), captured.out, captured.err, *written):
        assert not [secret for secret in secrets for start in (secret[:6], secret[-6:]) if start in text]


def test_a_key_that_the_pages_of_the_server_repeat_is_not_shown(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    for models in ({"data": [{"id": KEY}, {"id": "b"}]}, {"key": KEY}):
        server.models = models
        with pytest.raises(ValueError, match=r"responses\.") as failed:
            respond(by_server("responses.api_key_variable=SOME_KEY"))
        assert KEY[:6] not in str(failed.value)


@pytest.mark.parametrize("url", ["http://me:p/w@h:9/v1", "http://me:1/w@h:9/v1", "http://a#b:c@h/v1", "http://a:b?c@h"])
def test_a_password_that_is_not_encoded_is_refused_without_showing_it(by_server: ConfigFor, url: str) -> None:
    with pytest.raises(ValueError, match=r"^responses\.url: the user and password must be percent-encoded") as failed:
        respond(by_server(f"responses.url='{url}'"))
    assert "@" not in str(failed.value)


@pytest.mark.parametrize("is_query", [False, True], ids=["password", "key in the query"])
def test_a_secret_of_the_address_reaches_the_server_and_no_file_of_the_run(
    by_server: ConfigFor,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_query: bool,
) -> None:
    server.query = "api=1&key=sesame" if is_query else ""
    url, shown = (
        (f"'{server.url}?{server.query}'", f"{server.url}?api=***&key=***")
        if is_query
        else (server.url.replace("://", "://me:sesame@"), "://***@127.0.0.1")
    )
    monkeypatch.setattr("sys.argv", ["responses", f"responses.url={url}", f"serving.url={url}"])
    config = by_server(f"responses.url={url}", f"serving.url={url}")
    respond(config)
    write_provenance(Path(config.run_dir) / "train", make_config(f"responses.url={url}"))
    texts = {path: path.read_text() for path in Path(config.run_dir).rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if "sesame" in text] == []
    assert sum(shown in text for text in texts.values()) == 4
    printed = capfd.readouterr()
    assert shown in printed.out and "sesame" not in printed.out + printed.err
    server.query = "another"
    with pytest.raises(UserError, match="401") as refused:
        respond(by_server(f"responses.url={url}", "responses.max_retries=0", f"run_dir={config.run_dir}2"))
    assert "sesame" not in str(refused.value)


def test_the_chosen_model_and_the_end_of_a_redirect_are_named(
    by_server: ConfigFor, server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as other:
        server.reply = lambda path, request, key: (307, other.url.removesuffix("/v1") + path)  # type: ignore[method-assign]
        assert respond(by_server(rows=ONE_CHAT)).failed == 0
        printed = capfd.readouterr().out
        assert f"responses.url: {server.url}/models is redirected to {other.url}/models\n" in printed
        assert printed.count(f"is redirected to {other.url}/completions\n") == 1
        assert f"responses.url: model tiny of {server.url} responds\n" in printed


@pytest.mark.parametrize(
    ("more", "is_taken"),
    [
        ({"text": "something else"}, False),
        ({"text": ""}, False),
        ({"text": ' "#  '}, True),
        ({"text": '"#<|end|>'}, True),
        ({"text": '"#\ufffd'}, True),
    ],
)
def test_token_ids_that_are_not_those_of_the_text_are_refused(
    by_server: ConfigFor, server: FakeServer, more: dict[str, str], is_taken: bool
) -> None:
    server.behave = lambda request: completion(request["prompt"], [1, 2, EOS], **more)
    config = by_server(rows=ONE_CHAT)
    if is_taken:
        assert respond(config).failed == 0
        return
    with pytest.raises(UserError, match="at least one conversation must get a response"):
        respond(config)
    assert "token_ids must be those of its text, but decode to another text" in failures(config)[0]["reason"]


def test_a_server_with_another_tokenizer_is_refused_before_any_prompt_is_sent(
    by_server: ConfigFor, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.data_prep.speaking.answer_by_prompt", lambda request: completion(request["prompt"], [5], text="hello")
    )
    with pytest.raises(ValueError, match=r"must be those of its text, but decode to another text than 'hello'; serve"):
        respond(by_server())
    assert not server.requests


def test_an_error_is_read_only_at_its_beginning(by_server: ConfigFor, server: FakeServer) -> None:
    chunk, sent = b"x" * 2**16, []

    def endless() -> Any:
        while len(sent) < 4_000:
            sent.append(len(chunk))
            yield chunk

    server.behave = lambda request: (400, endless())
    with pytest.raises(UserError):
        respond(by_server("responses.max_retries=0", rows=ONE_CHAT))
    assert sum(sent) < 4_000 * transport.MAX_ERROR_BYTES


def test_masking_hides_secrets_and_homes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hide_passwords(["x=http://me:a@b:c@h/v1", {"p": "hf://a/b@c"}]) == ["x=http://***@h/v1", {"p": "hf://a/b@c"}]
    assert hide_secrets("the key is abcdefgh, abcdef", ["abcdefgh", "a"]) == "the key is ***, ***"
    assert (
        hide_passwords("a 'http://h/v1?key=1&b' http://h?c#d ?e=f") == "a 'http://h/v1?key=***&***' http://h?***#d ?e=f"
    )
    monkeypatch.setenv("HOME", "/root")
    assert hide_home(json.dumps(["/root/runs", "/root", "/rootfs/a", "/mnt/root/b"])) == json.dumps(
        ["~/runs", "~", "/rootfs/a", "/mnt/root/b"]
    )
    monkeypatch.setenv("HOME", "/")
    assert hide_home("/root/runs") == "/root/runs" and not re.search("~", hide_home("a / b"))
