"""Provides conversations, a target and a server that answer them, configs for both, and readers of what is written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.responses import server as completion_server
from data_prep.responses.regenerate import prepare_responses
from data_prep.responses.store import ResponsesManifest
from mtptrain.config import PipelineConfig
from mtptrain.run_dir import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import init_ranks
from tests.conftest import make_config
from tests.data_prep.speaking import FakeServer, answer_by_prompt, fake_server, make_speaking_target

SETTINGS = (
    "prompts.source=responses",
    "responses.max_new_tokens=24",
    "responses.dtype=float32",
    "responses.engine=transformers",
)
ConfigFor = Callable[..., PipelineConfig]


def chat(name: str, num_turns: int, system: str = "") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"question {turn} of {name}"})
        messages.append({"role": "assistant", "content": f"old answer {turn}"})
    return {"id": name, "messages": messages}


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
    """Makes retries nearly immediate, and restores torch's number of threads after the test."""
    monkeypatch.setattr(completion_server, "BACKOFF_S", 0.01)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def configure(tmp_path: Path, speaking_target: Path) -> ConfigFor:
    """Returns a function that makes a config for a jsonl file of the given rows and settings of `responses`."""

    def build(
        rows: list[dict[str, Any]] = CHATS, run: str = "run", target: Path | None = None, seed: int = 0, **settings: Any
    ) -> PipelineConfig:
        paths = (f"run_dir={tmp_path}/{run}", f"target.path={target or speaking_target}", "prompts.paths=[a]")
        config = make_config(*paths, f"seed={seed}", "prompts.validation_fraction=0.3", *SETTINGS)
        config.prompts.paths = [write_rows(tmp_path / "chats.jsonl", rows)]
        for name, value in settings.items():
            assert hasattr(config.responses, name)
            setattr(config.responses, name, value)
        return config

    return build


@pytest.fixture
def by_server(configure: ConfigFor, server: FakeServer) -> ConfigFor:
    return lambda **settings: configure(**{"url": server.url, **settings})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def respond(config: PipelineConfig) -> ResponsesManifest:
    manifest = prepare_responses(Run(config), init_ranks(1))
    assert manifest is not None
    return manifest


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(config: PipelineConfig) -> list[dict[str, Any]]:
    return read_lines(config.stage_dir("responses") / "conversations.jsonl")


def answers_of(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def failures(config: PipelineConfig) -> dict[int, str]:
    """Returns why a row failed or ended early, by its index in its file."""
    lines = read_lines(config.stage_dir("responses") / "failures.jsonl")
    return {int(line["place"].rsplit(":", 1)[1]) - 1: line["reason"] for line in lines}


def output(config: PipelineConfig) -> dict[str, bytes]:
    """Returns the files of the stage, but for those that record how the program was called."""
    paths = config.stage_dir("responses").iterdir()
    return {path.name: path.read_bytes() for path in paths if path.name != "stage.json"}


def answer_by_question(table: dict[str, Callable[[list[int]], Any]], target: Path) -> Callable[[dict[str, Any]], Any]:
    """Returns a server behaviour that uses the first entry of `table` whose key is in the last user turn.

    Without a match, the server behaves as `answer_by_prompt`.
    """
    tokenizer = load_tokenizer(target)

    def behave(request: dict[str, Any]) -> Any:
        question = tokenizer.decode(request["prompt"]).rsplit("<user>", 1)[-1]
        found = next((make for word, make in table.items() if word in question), None)
        return answer_by_prompt(request) if found is None else found(request["prompt"])

    return behave
