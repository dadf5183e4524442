"""Tests that rows that are tokenized already are written as they are, after a check of lengths and ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep.prompt_sources import read_tokens
from data_prep.prompts import prepare_prompts
from data_prep.prompts_report import print_report
from mtptrain.data.conversation import ConversationRefused
from mtptrain.run import Run
from tests.data_prep.prompts.documents import ConfigFor, read_output

ROWS = [{"id": f"row{i}", "input_ids": [i, 7, 8, 9 + i % 2, 9], "loss_mask": [0, 0, 1, 1, 1]} for i in range(24)]


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"prompts.paths=[{path}]"


ADVICE = "(add labels to prompts.metadata to pass it over)"
TOKENS = ("prompts.source=tokens", "prompts.validation_fraction=0.3")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tokens_and_masks_are_written_as_they_are(config_for: ConfigFor, tmp_path: Path, suffix: str) -> None:
    rows = [{**row, "loss_mask": [bool(x) for x in row["loss_mask"]]} if i % 2 else row for i, row in enumerate(ROWS)]  # type: ignore[attr-defined]
    given = write(tmp_path / f"tokens.{suffix}", rows if suffix == "jsonl" else ROWS)
    config = config_for(*TOKENS, given)
    report = prepare_prompts(Run(config))
    written = {name: (tokens, mask) for name, [(_, tokens, mask)] in read_output(config).items()}
    assert written == {row["id"]: (row["input_ids"], row["loss_mask"]) for row in ROWS}
    assert sum(split.supervised_tokens for split in report.splits.values()) == 24 * 3


def test_answers_to_one_prompt_stay_in_one_split_and_copies_are_left_out(config_for: ConfigFor, tmp_path: Path) -> None:
    rows = [{"input_ids": [i % 10, 7, 8 + i // 10, 9], "loss_mask": [0, 0, 1, 1]} for i in range(40)]
    config = config_for(*TOKENS, write(tmp_path / "tokens.jsonl", [*rows, rows[0]]))
    report = prepare_prompts(Run(config))
    splits: dict[int, set[str]] = {}
    for [(entry, tokens, _)] in read_output(config).values():
        splits.setdefault(tokens[0], set()).add(entry.split)
    assert len(splits) == 10 and all(len(found) == 1 for found in splits.values())
    assert (report.duplicates.questions, report.duplicates.dropped) == (10, 1)


def test_rows_that_cannot_be_used_are_counted_by_reason(
    config_for: ConfigFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"input_ids": [1, 2], "loss_mask": [1]}
    config = config_for(*TOKENS, write(tmp_path / "tokens.jsonl", [*ROWS, short, short]))
    report = prepare_prompts(Run(config))
    assert [(group.reason, group.count) for group in report.refused] == [
        ("input_ids and masks of different lengths", 2)
    ]
    print_report(report)
    assert "refused: 2 of the 26 rows of the source" in capsys.readouterr().out


def test_tokens_of_another_tokenizer_are_refused_with_their_line(config_for: ConfigFor, tmp_path: Path) -> None:
    given = write(tmp_path / "tokens.jsonl", [*ROWS, {"input_ids": [1, 260, 3], "loss_mask": [0, 1, 1]}])
    with pytest.raises(ValueError, match=r"vocab_size 260, but .*tokens\.jsonl:25 has 260; the tokenizer, or the data"):
        prepare_prompts(Run(config_for(*TOKENS, given)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": None}, "no column loss_mask, but input_ids"),
        ({"loss_mask": [0, 0, 0]}, "a loss_mask that selects no token"),
        ({"loss_mask": [0, 0, 2]}, "loss_mask must be a list of whole numbers from 0 to 1, but is not"),
        ({"loss_mask": [0, 0, 0.5]}, "loss_mask must be a list of whole numbers from 0 to 1, but is not"),
        ({"input_ids": [1, -1, 2]}, "input_ids must be a list of whole numbers from 0 to 2,147,483,647, but is not"),
        ({"input_ids": "abc"}, "input_ids must be a list of whole numbers from 0 to 2,147,483,647, but is not"),
        ({"input_ids": [1, 2]}, "input_ids and masks of different lengths"),
        ({"attention_mask": [1, 1]}, "input_ids and masks of different lengths"),
        ({"attention_mask": [1, 1, 0]}, "an attention_mask with zeros, which is not read: leave out the padding"),
        ({"labels": [1]}, f"column labels, which may change what is trained {ADVICE}"),
    ],
)
def test_a_row_of_tokens_that_cannot_be_used_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    assert read_tokens({**row, "attention_mask": [1, 1, 1], "source": "x"})[0].loss_mask.tolist() == [0, 1, 1]
    with pytest.raises(ConversationRefused) as refused:
        read_tokens({**row, **change})
    assert str(refused.value) == reason
