"""Tests that every choice of `prompts` for a data set on the hub reads all rows of that data set's schema."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep import conversations
from data_prep.conversations import read_conversations
from data_prep.prompts import prepare_prompts
from mtptrain.config import RECIPES
from mtptrain.run import Run
from tests.data_prep.prompts.documents import ConfigFor


def messages(i: int) -> list[dict[str, Any]]:
    return [{"content": f"question {i}", "role": "user"}, {"content": f"answer {i}", "role": "assistant"}]


def turns(i: int) -> list[dict[str, Any]]:
    return [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": f"answer {i}"}]


def magpie(i: int) -> dict[str, Any]:
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "input_generator": "model",
        "seed": None,
        "pre_query_template": "<|x|>",
    }
    return {
        "uuid": f"u{i}", "model": "model", "gen_input_configs": sampling, "instruction": f"question {i}",
        "response": f"answer {i}", "conversations": turns(i), "task_category": "Math", "other_task_category": [],
        "task_category_generated_by": "model", "difficulty": "easy", "intent": "To ask.", "knowledge": "Sums.",
        "difficulty_generated_by": "model", "input_quality": "good", "quality_explanation": "It is clear.",
        "quality_generated_by": "model", "llama_guard_2": "safe", "reward_model": "model", "instruct_reward": 0.5,
        "min_neighbor_distance": 0.1, "repeat_count": 0, "min_similar_uuid": None, "instruction_length": 10,
        "response_length": 8, "language": "EN",
    }  # fmt: skip


def nemotron(i: int) -> dict[str, Any]:
    described = {"license": "cc-by-4.0", "generator": "model", "version": "v2", "category": "chat"}
    return {"uuid": f"u{i}", **described, "reasoning": "on" if i % 2 else "off", "messages": messages(i)}


SHARED = [{"from": ("human", "bing")[i % 2], "value": f"turn {i}", "markdown": None} for i in range(4)]
SCHEMAS: dict[str, Any] = {
    "ultrachat_200k": lambda i: {"prompt": f"question {i}", "prompt_id": f"p{i}", "messages": messages(i)},
    "sharegpt": lambda i: {"id": f"c_{i}", "conversations": turns(i) if i % 2 else [*turns(i), *SHARED]},
    "open_perfectblend": lambda i: {"conversations": turns(i), "source": "meta-math/MetaMathQA"},
    "magpie": magpie,
    "nemotron": nemotron,
    "tulu_3": lambda i: {"id": f"t{i}", "messages": messages(i), "source": "ai2-adapt-dev/oasst1_converted"},
}
"""Rows by number, for each choice of `prompts` that names a data set."""
OWN = {"chats", "chats_32k", "conversations", "standard_library"}


def test_every_data_set_has_rows_here() -> None:
    assert {path.stem for path in Path(RECIPES, "prompts").glob("*.yaml")} == {*SCHEMAS, *OWN}


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_row_of_a_data_set_is_refused(
    config_for: ConfigFor, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.from_list([SCHEMAS[name](i) for i in range(20)])
    asked = []

    def load_dataset(path: str, split: str) -> Dataset:
        asked.append((path, split))
        return data

    monkeypatch.setattr(conversations, "load_dataset", load_dataset)
    config = config_for(f"prompts={name}", "prompts.source=conversations", "prompts.validation_fraction=0.3")
    report = prepare_prompts(Run(config))
    assert (report.refused, report.items) == ([], 20)
    assert asked == [(config.prompts.paths[0], config.prompts.split)] and "/" in asked[0][0]


def test_the_roles_of_sharegpt_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(SCHEMAS["sharegpt"](i)) + "\n" for i in range(4)))
    assert set(read_conversations([str(path)]).refused.values()) == {"unknown role 'bing'"}
