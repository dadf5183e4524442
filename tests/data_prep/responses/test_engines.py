"""Tests that engines are found, started, watched and ended, with a program that answers as `vllm serve` does."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.responses.engines import device_groups
from mtptrain.config import AnsweringEngine
from mtptrain.engines import process, table
from mtptrain.run_dir import Run
from mtptrain.utils.errors import UserError
from tests.conftest import make_config
from tests.data_prep.responses.conftest import CHATS, ConfigFor, answered, answers_of, output, respond
from tests.data_prep.speaking import EOS, NUM_PRINTABLE
from tests.programs import fake_python

ENGINE = f"""#!{sys.executable}
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
folder, arguments, lock = os.path.dirname(__file__), sys.argv, threading.Lock()
if "--port" not in arguments:
    sys.exit(print("0.32.0"))
does = open(folder + "/does").read().split()
if does[0] == "fails":
    sys.exit("out of memory")
name = "other" if does[0] == "other" else arguments[arguments.index("--served-model-name") + 1]
left = [int(does[1]) if does[0] == "dies" else -1]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        pages = {{"/v1/models": {{"data": [{{"id": name, "max_model_len": 99}}]}}, "/version": {{"version": "0.32.0"}}}}
        self.reply(pages.get(self.path, {{}}))

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            if left[0] == 0:
                print("out of memory", flush=True)
                os._exit(3)
            left[0] -= 1
            with open(folder + "/asked", "a") as file:
                file.write(json.dumps(request["prompt"]) + "\\n")
        total = sum(request["prompt"])
        ids = [(total + i) % {NUM_PRINTABLE} for i in range(3)][: request["max_tokens"]]
        ends = len(ids) < request["max_tokens"]
        choice = {{"text": "".join(chr(33 + i) for i in ids), "finish_reason": "stop" if ends else "length"}}
        self.reply({{"choices": [choice | {{"token_ids": ids + [{EOS}] * ends}}]}})

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def by_engine(configure: ConfigFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigFor:
    """Returns a function that makes a config for the engine above, which does as its first argument says."""
    monkeypatch.setattr(process, "ENDING_S", 5.0)
    program = fake_python(tmp_path, ENGINE)

    def build(does: str, engine: AnsweringEngine = AnsweringEngine.vllm, **settings: Any) -> Any:
        (tmp_path / "does").write_text(does)
        config = configure(engine=engine, **settings)
        config.serving.program = str(program)
        return config

    return build


def test_an_engine_that_dies_stops_the_run_and_the_next_start_asks_nothing_twice(
    by_engine: ConfigFor, tmp_path: Path
) -> None:
    undisturbed = by_engine("answers", run="undisturbed")
    assert respond(undisturbed).server_versions == ["vLLM 0.32.0"]
    (tmp_path / "asked").unlink()
    message = (
        r"^vllm serve: must run until all prompts are answered, but ended with status 3; its log is .*server_0\.log"
    )
    with pytest.raises(UserError, match=message) as died:
        respond(by_engine("dies 25", concurrency=4))
    assert "out of memory" in str(died.value)
    done = {name for name, _ in stored(tmp_path / "run/responses/answers_00000.jsonl")}
    assert 0 < len(done) < len(CHATS)
    (tmp_path / "asked").unlink()
    config = by_engine("answers", engine=AnsweringEngine.auto)
    config = make_resumed(config)
    respond(config)
    rows = [row for row in CHATS if row["id"] not in done]
    asked = Counter((tmp_path / "asked").read_text().splitlines())
    assert asked.total() == 1 + sum(len(row["messages"]) // 2 for row in rows)  # the first is the check of the start
    assert output(config) | {"server_0.log": b""} == output(undisturbed) | {"server_0.log": b""}
    assert all(len(answer) == 3 for row in answered(config) for answer in answers_of(row))


def stored(path: Path) -> list[tuple[str, int]]:
    return [(row["id"], row["row"]) for row in map(json.loads, path.read_text().splitlines())]


def make_resumed(config: Any) -> Any:
    """Returns the config after what `load_config` does with `auto` in a folder that another engine began."""
    resumed = make_config(f"run_dir={config.run_dir}", f"target.path={config.target.path}")
    config.responses.engine = resumed.responses.engine
    return config


def test_an_engine_that_cannot_answer_is_refused_and_what_is_there_stays(by_engine: ConfigFor, tmp_path: Path) -> None:
    respond(by_engine("answers", rows=CHATS[:3]))
    before = output(by_engine("answers"))
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("fails", {}, r"^vllm serve: must start, but ended with status 1; its log is (?s:.*)lines are:\nout of memory"),
        (
            "other",
            {},
            r"responses\.engine: the server at \S+ must be the one that was started for this run, but serves other, so",
        ),
        (
            "answers",
            {"temperature": 0.005},
            r"but is vllm: it takes temperatures of 0 and from 0\.01 to 2 .*not 0\.005;",
        ),
        (
            "answers",
            {"engine": AnsweringEngine.llama_cpp},
            r"^responses\.engine: must be .*, but is llama_cpp: it serv",
        ),
    ]
    for does, settings, message in cases:
        config = by_engine(does, run="again", **settings)
        with pytest.raises(UserError, match=message):
            respond(config)
    config.serving.program, config.responses.engine = str(tmp_path / "missing"), AnsweringEngine.vllm
    with pytest.raises(
        UserError, match=r"^serving\.program: must be a Python with vLLM, but .*/missing does not exist"
    ):
        respond(config)
    assert not (tmp_path / "run/again/conversations.jsonl").exists() and output(by_engine("answers")) == before


def test_auto_takes_what_is_installed_and_says_why(
    by_engine: ConfigFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fallback = "transformers, our own loop; not "
    cases: list[tuple[bool, bool, str]] = [  # has a GPU, has vLLM
        (True, True, "vllm, which is installed and answers as the target is sampled$"),
        (True, False, fallback + "vllm: it is not installed here, as responses.engine=vllm says$"),
        (False, True, "transformers, our own loop$"),
    ]
    for number, (has_gpu, is_installed, said) in enumerate(cases):
        monkeypatch.setattr(table, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        config = by_engine("answers", engine=AnsweringEngine.auto, run=str(number), rows=CHATS[:2])
        config.serving.program = config.serving.program if is_installed else str(tmp_path / "missing")
        assert respond(config).identity.backend == config.responses.engine == said.split(",")[0]
        assert re.search(f"(?m)^responses.engine: {said}", capsys.readouterr().out)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Run(by_engine("answers", engine=AnsweringEngine.auto)).answering[0] == "transformers"
    with pytest.raises(UserError, match=r"responses\.engine: must be left out with responses\.url, .*, but is vllm"):
        make_config("responses.engine=vllm", "responses.url=http://127.0.0.1:9/v1")


def test_each_engine_has_its_share_of_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_groups(2) == [""]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5,6,7")
    assert device_groups(2) == ["0,3", "5,6"] and device_groups(1) == ["0", "3", "5", "6", "7"]
