"""Tests that `mtptrain responses` gets the same answers from `vllm serve` as from transformers, and can resume."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import prepare_responses
from mtptrain.run import Run
from mtptrain.utils.distributed import Ranks
from tests.conftest import make_config
from tests.data_prep.speaking import make_speaking_target
from tests.serving.conftest import vllm_server

pytestmark = pytest.mark.slow
ONE_RANK = Ranks(rank=0, world_size=1, local_rank=0)
NUM_CHATS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking_target(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def url(vllm_python: str, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the base URL of a vLLM server of the target."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with vllm_server(vllm_python, target, log_path, "--served-model-name", "speaking") as root:
        yield f"{root}/v1"


@pytest.fixture(scope="module")
def overrides(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [{"id": f"chat{i}", "messages": turns(i)} for i in range(NUM_CHATS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "prompts.source=responses",
        "prompts.validation_fraction=0.3",
        "responses.max_new_tokens=32",
        "responses.dtype=float32",
    ]
    return [f"target.path={target}", f"prompts.paths=[{path}]", *settings]


def turns(number: int) -> list[dict[str, str]]:
    pairs = [
        [{"role": "user", "content": f"question {turn} of {number}"}, {"role": "assistant", "content": "old"}]
        for turn in range(1 + number % 3)
    ]
    return [message for pair in pairs for message in pair]


def respond(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Generate the answers, and return their manifest."""
    prepare_responses(Run(make_config(f"run_dir={run_dir}", *overrides)), ONE_RANK)
    manifest: dict[str, Any] = json.loads((run_dir / "responses/manifest.json").read_text())
    return manifest


def test_vllm_and_transformers_give_the_same_conversations(url: str, overrides: list[str], tmp_path: Path) -> None:
    here = respond(tmp_path / "here", *overrides)
    served = respond(tmp_path / "served", *overrides, f"responses.url={url}", "responses.concurrency=8")
    answered = [(tmp_path / run / "responses/conversations.jsonl").read_bytes() for run in ("here", "served")]
    assert answered[0] == answered[1]
    assert served["counts"] == here["counts"]
    assert served["counts"]["texts_changed"] == served["counts"]["tokens_changed"] == 0 == served["failed"]
    assert served["counts"]["answers"] > NUM_CHATS and served["counts"]["cut"] > 0
    assert (served["identity"]["model"], served["identity"]["settings"]["context_tokens"]) == ("speaking", 512)
    assert served["server_versions"] == ["vLLM 0.32.0"]

    prepare_prompts(Run(make_config(f"run_dir={tmp_path}/served", *overrides)))
    report = json.loads((tmp_path / "served/prompts/report.json").read_text())
    supervised = sum(report["counts"][f"{split}_supervised_tokens"] for split in ("train", "validation"))
    assert supervised == served["counts"]["answer_tokens"], "exactly the generated tokens must be supervised"


def test_sampled_answers_of_vllm_depend_on_the_seed_alone(url: str, overrides: list[str], tmp_path: Path) -> None:
    sampled = [
        *overrides,
        f"responses.url={url}",
        "responses.temperature=1.0",
        "responses.top_k=30",
        "responses.top_p=0.95",
    ]
    runs = {"many": ["responses.concurrency=16"], "one": ["responses.concurrency=1"], "seed": ["seed=1"]}
    texts = {}
    for run, settings in runs.items():
        respond(tmp_path / run, *sampled, *settings)
        texts[run] = (tmp_path / run / "responses/conversations.jsonl").read_text()
    assert texts["many"] == texts["one"] != texts["seed"]
