"""Tests that an interrupted or killed run resumes from its saved answers, unless settings, data or target changed."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses import server as completion_server
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import program_command, run_program
from tests.data_prep.responses.stage import (
    CHATS,
    ConfigFor,
    answer_by_question,
    answered,
    chat,
    output,
    overrides_for,
    read_lines,
    respond,
)
from tests.data_prep.speaking import FakeServer, answer_by_prompt, make_speaking_target
from tests.programs import ROOT
from tests.sealed import flip_bit, seal_again


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
    assert 10 <= len(server.requests) <= 13, "at most the three other concurrent requests still arrive"
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
        program_command("responses", *overrides),
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
    result = run_program("responses", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{40 - len(done)} conversations, " in result.stdout
    asked = [load_tokenizer(speaking_target).decode(request["prompt"]) for request in server.requests]
    assert len(asked) == sum(len(row["messages"]) // 2 for row in rows if row["id"] not in done)
    assert output(by_server(rows=rows)) == output(undisturbed)


def test_a_kill_after_the_new_settings_are_written_leaves_no_manifest_but_all_responses(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, interrupt_after_config: Callable[[], None]
) -> None:
    server.behave = answer_by_question({"of chat3": lambda prompt: (400, {"error": "no"})}, speaking_target)
    config = by_server()
    assert respond(config).failed == 1
    before = answered(config)
    interrupt_after_config()
    with pytest.raises(KeyboardInterrupt):
        respond(by_server("train.lr=0.5"))
    assert "lr: 0.5" in (config.stage_dir("responses") / "config.yaml").read_text()
    assert not (config.stage_dir("responses") / "manifest.json").exists()
    assert answered(config) == before
    with pytest.raises(KeyboardInterrupt):  # and does not refuse the responses
        respond(config)


def test_what_somebody_else_has_put_into_the_folder_stays(by_server: ConfigFor) -> None:
    config, names = by_server(), ["notes.tmp", "answers_mine.jsonl"]
    respond(config)
    for name in names:
        (config.stage_dir("responses") / name).write_text("mine")
    respond(config)
    assert [(config.stage_dir("responses") / name).read_text() for name in names] == ["mine", "mine"]


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
    (tmp_path / "more.jsonl").write_text(json.dumps(chat("more", 1)) + "\n")
    two, turned = (
        by_server(f"prompts.paths=[{','.join(str(tmp_path / f'{name}.jsonl') for name in names)}]", run="two")
        for names in (("chats", "more"), ("more", "chats"))
    )
    respond(two)
    with pytest.raises(ValueError, match=r"the order of prompts\.paths must be \[.*/more\.jsonl.*chats.*\], but is \["):
        respond(turned)
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


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("plan.json", {"identity": ...}, "lacks identity"),
        ("plan.json", {"server_versions": "vLLM"}, "server_versions is vLLM"),
        ("manifest.json", {"identity": {"a": 1}}, r"has the unknown entry identity\.a"),
    ],
)
def test_a_damaged_plan_or_manifest_is_refused_by_name(
    by_server: ConfigFor, name: str, change: dict[str, Any], reason: str
) -> None:
    config = by_server(rows=CHATS[:1])
    respond(config)
    directory = config.stage_dir("responses")
    if name == "plan.json":
        content = json.loads((directory / "manifest.json").read_text())
        write_sealed(directory / name, {key: content[key] for key in ("identity", "server_versions")})
    seal_again(directory / name, **change)
    message = rf"responses/{name}: must be as mtptrain responses writes it, but {reason}; delete \S+resp"
    with pytest.raises(ValueError, match=message):
        respond(config)
    if name == "manifest.json":
        with pytest.raises(ValueError, match=message):
            prepare_prompts(Run(config))


def test_responses_of_which_nothing_says_what_they_belong_to_are_refused(by_server: ConfigFor) -> None:
    config = by_server(rows=CHATS[:1])
    respond(config)
    (config.stage_dir("responses") / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"responses: must hold plan\.json or manifest\.json .*, but holds neither; d"):
        respond(config)


def test_a_changed_answer_is_named_before_it_becomes_a_prompt(by_server: ConfigFor) -> None:
    config = by_server(rows=CHATS[:2])
    respond(config)
    path = config.stage_dir("responses") / "conversations.jsonl"
    flip_bit(path, path.read_bytes().rindex(b"assistant") + 30)
    for use in (lambda config: prepare_prompts(Run(config)), respond):
        with pytest.raises(UserError, match=r"conversations\.jsonl: must be as mtptrain wrote it, but was changed"):
            use(config)
