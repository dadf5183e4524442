"""Provides conversations, runs the responses stage on them in this process, and reads what the stage writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.responses.manifest import ResponsesManifest
from data_prep.responses.regenerate import prepare_responses
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import Ranks
from tests.data_prep.speaking import answer_by_prompt

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


def respond(config: PipelineConfig) -> ResponsesManifest:
    manifest = prepare_responses(Run(config), ONE_RANK)
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
    """Returns a server behaviour that uses the first entry of `table` whose key is in the last user turn.

    Without a match, the server behaves as `answer_by_prompt`.
    """
    tokenizer = load_tokenizer(target)

    def behave(request: dict[str, Any]) -> Any:
        question = tokenizer.decode(request["prompt"]).rsplit("<user>", 1)[-1]
        found = next((make for word, make in table.items() if word in question), None)
        return answer_by_prompt(request) if found is None else found(request["prompt"])

    return behave
