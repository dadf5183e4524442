"""Tests that rows that are tokenized already are written as they are, after a check of lengths and ids."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep.prompt_sources import read_tokens
from data_prep.prompts import prepare_prompts
from mtptrain.data.conversation import ConversationRefused
from mtptrain.run_dir import Run
from tests.data_prep.prompts.documents import ConfigFor, read_output

TOKENS = "prompts.source=tokens"
ROWS: list[dict[str, Any]] = [
    {"id": f"row{i}", "input_ids": [i, 7, 8, 9 + i % 2, 9], "loss_mask": [0, 0, 1, 1, 1]} for i in range(24)
]


def test_tokens_and_masks_are_written_as_they_are(chat_config: ConfigFor, tmp_path: Path) -> None:
    rows = [{**row, "loss_mask": [bool(x) for x in row["loss_mask"]]} if i % 2 else row for i, row in enumerate(ROWS)]
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    for paths in ((), (f"prompts.paths=[{tmp_path}/rows.parquet]",)):
        config = chat_config(rows, TOKENS, *paths)
        report = prepare_prompts(Run(config))
        written = {name: (tokens, mask) for name, [(_, tokens, mask)] in read_output(config).items()}
        assert written == {row["id"]: (row["input_ids"], row["loss_mask"]) for row in ROWS}
        assert report.counts["train_supervised_tokens"] + report.counts["validation_supervised_tokens"] == 24 * 3


def test_answers_to_one_prompt_stay_in_one_split_and_copies_are_left_out(chat_config: ConfigFor) -> None:
    rows = [{"input_ids": [i % 10, 7, 8 + i // 10, 9], "loss_mask": [0, 0, 1, 1]} for i in range(40)]
    config = chat_config([*rows, rows[0]], TOKENS)
    report = prepare_prompts(Run(config))
    splits: dict[int, set[str]] = {}
    for [(entry, tokens, _)] in read_output(config).values():
        splits.setdefault(tokens[0], set()).add(entry.split)
    assert len(splits) == 10 and all(len(found) == 1 for found in splits.values())
    assert (report.counts["questions"], report.counts["copies"]) == (10, 1)


def test_a_row_of_tokens_that_cannot_be_used_is_refused_with_the_reason() -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    encoding, passed_over = read_tokens({**row, "attention_mask": [1, 1, 1], "source": "x", "id": 3})
    assert (encoding.loss_mask.tolist(), passed_over) == ([0, 1, 1], {"source"})
    no_list = "must be a list of whole numbers from 0 to"
    for change, reason in (
        ({"loss_mask": None}, "no column loss_mask, but input_ids"),
        ({"loss_mask": [0, 0, 0]}, "a loss_mask that selects no token"),
        ({"loss_mask": [0, 0, 2]}, f"loss_mask {no_list} 1, but is not"),
        ({"input_ids": [1, -1, 2]}, f"input_ids {no_list} 2,147,483,647, but is not"),
        ({"attention_mask": [1, 1]}, "input_ids and masks of different lengths"),
        ({"attention_mask": [1, 1, 0]}, "an attention_mask with zeros, which is not read: leave out the padding"),
    ):
        with pytest.raises(ConversationRefused) as refused:
            read_tokens({**row, **change})
        assert str(refused.value) == reason
    assert read_tokens({**row, "labels": [1]}, ["labels"])[1] == set()
