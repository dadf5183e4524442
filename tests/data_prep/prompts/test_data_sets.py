"""Tests that the choices of `prompts` for data sets on the hub read all rows of that data set's schema."""

from typing import Any

import pytest
from datasets import Dataset

from data_prep import conversations
from data_prep.prompts import prepare_prompts
from mtptrain.run import Run
from tests.data_prep.prompts.documents import ConfigFor


def turns(i: int) -> list[dict[str, Any]]:
    return [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": f"answer {i}"}]


SHARED = [{"from": ("human", "bing")[i % 2], "value": f"turn {i}", "markdown": None} for i in range(4)]
DESCRIBED = ("model", "task_category", "knowledge", "input_quality", "llama_guard_2", "language")
SCHEMAS: dict[str, Any] = {
    "sharegpt": lambda i: {"id": f"c_{i}", "conversations": turns(i) if i % 2 else [*turns(i), *SHARED]},
    "magpie": lambda i: {
        **dict.fromkeys(DESCRIBED, "x"), "uuid": f"u{i}", "instruction": f"question {i}", "response": f"answer {i}",
        "gen_input_configs": {"temperature": 1.0, "input_generator": "x", "seed": None, "pre_query_template": "<|x|>"},
        "other_task_category": [], "instruct_reward": 0.5, "repeat_count": 0, "conversations": turns(i),
    },
    "nemotron": lambda i: {"uuid": f"u{i}", "reasoning": "on" if i % 2 else "off", "conversations": turns(i)},
}  # fmt: skip
"""Rows by number, for the choices of `prompts` whose data sets have columns of their own."""


def test_no_row_of_a_data_set_is_refused(config_for: ConfigFor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, schema in SCHEMAS.items():
        asked = []

        def load_dataset(path: str, split: str, schema: Any = schema, asked: list[Any] = asked) -> Dataset:
            asked.append((path, split))
            return Dataset.from_list([schema(i) for i in range(20)])

        monkeypatch.setattr(conversations, "load_dataset", load_dataset)
        config = config_for(f"prompts={name}", "prompts.source=conversations", "prompts.validation_fraction=0.3")
        report = prepare_prompts(Run(config))
        assert (report.refused, report.items) == ([], 20)
        assert asked == [(config.prompts.paths[0], config.prompts.split)] and "/" in asked[0][0]
