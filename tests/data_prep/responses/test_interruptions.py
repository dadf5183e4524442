"""Tests that an interrupted or killed run resumes from its saved answers, unless settings, data or target changed."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.run_dir import Run
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import succeed
from tests.data_prep.responses.conftest import CHATS, SETTINGS, ConfigFor, output, respond
from tests.data_prep.speaking import FakeServer, answer_by_prompt, make_speaking_target
from tests.sealed import flip_bit


def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(by_server: ConfigFor, server: FakeServer) -> None:
    undisturbed, config, has_ended = by_server(run="undisturbed"), by_server(concurrency=4), threading.Event()
    respond(undisturbed)

    def stuck(request: dict[str, Any]) -> Any:
        if len(server.requests) > 24:
            has_ended.wait(60)
        return answer_by_prompt(request)

    server.behave, server.requests = stuck, []
    directory = config.stage_dir("responses")
    journal = directory / "answers_00000.jsonl"
    process = multiprocessing.get_context("fork").Process(target=respond, args=(config,))
    process.start()
    while len(server.requests) < 25 or journal.read_bytes().count(b"\n") < 5:
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    has_ended.set()
    assert not (directory / "manifest.json").exists()
    done = {json.loads(line)["id"] for line in journal.read_bytes().split(b"\n")[:-1]}
    assert 5 <= len(done) < len(CHATS)
    others = {"notes.tmp": b"mine", "answers_mine.jsonl": b"mine"}  # files of somebody else stay
    for name, content in others.items():
        (directory / name).write_bytes(content)

    server.behave, server.requests = answer_by_prompt, []
    respond(config)
    assert len(server.requests) == sum(len(row["messages"]) // 2 for row in CHATS if row["id"] not in done)
    assert output(config) == output(undisturbed) | others


SAMPLED = {"temperature": 0.8, "top_k": 20, "batch_size": 3}


def test_a_killed_run_of_several_ranks_goes_on_with_two_and_ends_as_one_of_one(configure: ConfigFor) -> None:
    undisturbed, config = configure(**SAMPLED, run="undisturbed"), configure(**SAMPLED)
    respond(undisturbed)
    # Imitate a killed run: the journals of two ranks hold three complete rows and part of a fourth.
    written, directory = output(undisturbed), config.stage_dir("responses")
    directory.mkdir(parents=True)
    (directory / "stage.json").write_bytes((undisturbed.stage_dir("responses") / "stage.json").read_bytes())
    plan = {"identity": json.loads(written["manifest.json"])["identity"], "server_versions": []}
    write_sealed(directory / "plan.json", plan)
    lines = written["conversations.jsonl"].splitlines(keepends=True)
    (directory / "answers_00000.jsonl").write_bytes(lines[7] + lines[2])
    (directory / "answers_00005.jsonl").write_bytes(lines[11] + lines[3][:20])
    paths = (f"run_dir={config.run_dir}", f"target.path={config.target.path}", f"prompts.paths={config.prompts.paths}")
    sampled = [f"responses.{name}={value}" for name, value in SAMPLED.items()]
    said = succeed("responses", *paths, *SETTINGS, *sampled, num_ranks=2)
    assert " 17/17 " in said.stderr and "this run: 17 conversations, " in said.stdout
    assert output(config) == written


def test_other_settings_data_or_targets_do_not_go_on_with_these_answers(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    server.models = {"data": [{"id": name, "max_model_len": 512} for name in ("tiny", "tuned")]}
    respond(by_server(model="tiny"))
    before = output(by_server())
    other = make_speaking_target(tmp_path / "other", seed=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": 23, "seed": 1}, r"responses\.max_new_tokens must be 23, but is 24; seed must be 1, but is"),
        ({"url": None}, r"the engine \(responses\.engine, responses\.url\) must be transformers, but is server"),
        ({"rows": CHATS[1:]}, r"the conversations \(prompts\.paths and their hashes\) must be \{.*\}, but is \{"),
        ({"target": other}, r"the target's weights must be \w+, but is \w+ \(target expected: .*/other, found: "),
        ({"model": "tuned"}, r"the served model \(responses\.model\) must be tuned, but is tiny .*; undo the change"),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            respond(by_server(**{"model": "tiny", **settings}))
        assert output(by_server()) == before


def test_changed_answers_are_refused_by_name_before_they_become_prompts(by_server: ConfigFor) -> None:
    config = by_server(rows=CHATS[:2])
    respond(config)
    directory = config.stage_dir("responses")
    path = directory / "conversations.jsonl"
    flip_bit(path, path.read_bytes().rindex(b"assistant") + 30)
    for use in (respond, lambda config: prepare_prompts(Run(config))):
        with pytest.raises(UserError, match=r"conversations\.jsonl: must be as mtptrain wrote it, but was changed"):
            use(config)
    (directory / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"responses: must hold plan\.json or manifest\.json .*, but holds neither; d"):
        respond(config)
