"""Tests that rows come from files and data sets in any format, and that files that cannot be read are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from datasets import Dataset
from huggingface_hub.errors import HTTPError

from data_prep import conversations
from data_prep.conversations import read_conversations
from mtptrain.data.rows import parse_row
from mtptrain.utils.errors import UserError

MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
NARRATED = {"messages": [{"role": "narrator", "content": "hi"}]}
WRITERS: dict[str, Callable[[Path, list[Any]], object]] = {
    "jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "parquet": lambda path, rows: Dataset.from_list(rows).to_parquet(path),
}


def write(path: Path, *rows: Any) -> str:
    WRITERS[path.suffix[1:]](path, list(rows))
    return str(path)


def test_every_file_format_gives_the_same_conversations_one_file_after_the_other(tmp_path: Path) -> None:
    rows = [{"id": f"row{i}", **SHAREGPT} for i in range(3)]
    paths = [write(tmp_path / f"chats.{suffix}", *rows) for suffix in WRITERS]
    found = read_conversations(paths)
    assert found.names == ["row0", "row1", "row2"] * 3
    assert [found.messages(i) for i in range(9)] == [parse_row(SHAREGPT)[0]] * 9
    assert [found.location(i) for i in (0, 4, 8)] == [f"{paths[0]}:1", f"{paths[1]}:2", f"{paths[2]}:3"]


def test_refused_rows_are_listed_by_line_and_usable_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [MESSAGES, None, NARRATED, {**MESSAGES, "id": "last"}, [1], {**MESSAGES, "id": "\ud83d"}]
    path.write_text("\n".join("" if row is None else json.dumps(row) for row in rows))
    found = read_conversations([str(path)])
    assert (len(found.names), found.location(1)) == (2, f"{path}:4")
    assert found.refused == {
        f"{path}:3": "unknown role 'narrator'",
        f"{path}:5": "a row must be an object, but is list",
        f"{path}:6": "text that is not valid Unicode",
    }


def test_a_file_that_cannot_be_read_or_has_no_rows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(MESSAGES) + '\n{"messages": [\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "gr\xf6\xdfe"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "object.json").write_text("{}")
    Dataset.from_list([MESSAGES]).select([]).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "bits.parquet").write_bytes(Path(write(tmp_path / "good.parquet", MESSAGES)).read_bytes()[:-9])
    write(tmp_path / "odd.jsonl", NARRATED, {"prompt": "hi"}, {"prompt": "you"})
    (tmp_path / "chats.csv").write_text("a,b\n")
    for name, message in (
        ("broken.jsonl", r"broken\.jsonl:2: must be JSON, but is not \(Expecting value.*; correct or remove it"),
        ("latin.jsonl", r"latin\.jsonl:1: must be UTF-8, but is not \('utf-8' codec"),
        ("empty.jsonl", r"every file must hold at least one usable row, but .*empty\.jsonl holds none of 0; conv"),
        (
            "odd.jsonl",
            r"odd\.jsonl holds none of 3, 2 refused \(no column .*\), 1 refused \(unknown role 'nar.*; conv",
        ),
        ("object.json", r"object\.json: must hold one array of rows, but holds dict; convert it"),
        ("rows.parquet", r"rows\.parquet: must be a parquet file with rows, but cannot be read"),
        ("bits.parquet", r"bits\.parquet: must be a parquet file with rows, but cannot be read"),
        ("chats.csv", r"must name \.jsonl, \.json, \.parquet files or hub data sets, but '.*chats\.csv' is neither"),
        (".", r"files or hub data sets, but '.*' is neither; correct the path, list the files of a directory"),
        ("missing.parquet", r"files or hub data sets, but '.*missing\.parquet' is neither"),
    ):
        with pytest.raises(UserError, match=message):
            read_conversations([str(tmp_path / "good.parquet"), str(tmp_path / name)])


def test_a_data_set_that_cannot_be_loaded_or_has_a_row_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MagicMock()
    broken.__len__.return_value, broken.__getitem__.side_effect = 1, UnicodeDecodeError("utf-8", b"", 0, 1, "bad")
    for loaded, message in (
        (
            [HTTPError("403 Forbidden")],
            "'a/set' is not a file, and its split 'test' cannot be loaded .*: 403 For",
        ),
        ([broken], r"a/set: every row must be readable, but one is not \('utf-8' codec"),
    ):
        monkeypatch.setattr(conversations, "load_dataset", Mock(side_effect=loaded))
        with pytest.raises(UserError, match=message):
            read_conversations(["a/set"], split="test")
