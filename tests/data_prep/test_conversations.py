"""Tests that rows come from files and data sets in any format, and that files that cannot be read are named."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from datasets import Dataset, Features, Json, List, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError

from data_prep import conversations
from data_prep.conversations import read_conversations
from mtptrain.data.rows import parse_row
from mtptrain.utils.errors import UserError

MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
NARRATED = {"messages": [{"role": "narrator", "content": "hi"}]}
WRITERS: dict[str, Callable[[Path, list[Any]], object]] = {
    "jsonl": lambda path, rows: path.write_text(lines(rows)),
    "json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "parquet": lambda path, rows: Dataset.from_list(rows).to_parquet(path),
    "lines.json": lambda path, rows: path.write_text("\ufeff" + lines(rows)),
    "array.jsonl": lambda path, rows: path.write_text(json.dumps(rows) + "\n"),
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows).encode())),
    "zipped.json": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows, indent=1).encode())),
}
"""Writes rows in every form that is read, by the end of the file's name."""


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, *rows: Any) -> str:
    WRITERS[path.name.partition(".")[2]](path, list(rows))
    return str(path)


def test_every_file_format_gives_the_same_conversations_one_file_after_the_other(tmp_path: Path) -> None:
    rows = [{"id": f"row{i}", **SHAREGPT} for i in range(3)]
    paths = [write(tmp_path / f"chats.{suffix}", *rows) for suffix in WRITERS]
    found = read_conversations(paths)
    assert found.names == ["row0", "row1", "row2"] * len(WRITERS)
    assert [found.messages(i) for i in range(len(found.names))] == [parse_row(SHAREGPT)[0]] * len(found.names)
    assert [found.location(i) for i in (0, 4, 8)] == [f"{paths[0]}:1", f"{paths[1]}:2", f"{paths[2]}:3"]
    (tmp_path / "one.json").write_text(json.dumps({"id": "alone", **SHAREGPT}, indent=1))
    assert read_conversations([str(tmp_path / "one.json")]).names == ["alone"]


def test_refused_rows_are_listed_by_line_and_usable_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [[1], None, NARRATED, {**MESSAGES, "id": "last"}, MESSAGES, {**MESSAGES, "id": "\ud83d"}]
    path.write_text("\n".join("" if row is None else json.dumps(row) for row in rows))
    found = read_conversations([str(path)])
    assert (len(found.names), found.location(0)) == (2, f"{path}:4")
    assert found.refused == {
        f"{path}:1": "a row must be an object, but is list",
        f"{path}:3": "unknown role 'narrator'",
        f"{path}:6": "text that is not valid Unicode",
    }


def test_a_file_that_cannot_be_read_or_has_no_rows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(MESSAGES) + '\n{"messages": [\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "gr\xf6\xdfe"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "several.json").write_text(json.dumps(MESSAGES, indent=1) * 2)
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(lines([MESSAGES] * 9).encode())[:-9])
    Dataset.from_list([MESSAGES]).select([]).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "bits.parquet").write_bytes(Path(write(tmp_path / "good.parquet", MESSAGES)).read_bytes()[:-9])
    write(tmp_path / "odd.jsonl", NARRATED, {"prompt": "hi"}, {"prompt": "you"})
    (tmp_path / "chats.csv").write_text("a,b\n")
    for name, message in (
        ("broken.jsonl", r"broken\.jsonl:2: must be JSON, but is not \(Expecting value.*; correct or remove it"),
        ("latin.jsonl", r"latin\.jsonl: must be UTF-8, but is not \('utf-8' codec"),
        ("empty.jsonl", r"empty\.jsonl: 0 of 0 items were refused; every file must hold at least one usable row: conv"),
        ("odd.jsonl", r"odd\.jsonl: 3 of 3 .* refused: 2 \(no messages .*but prompt with.*\), 1 \(unknown role .*;"),
        ("several.json", r"several\.json: must be JSON, but is not \(Extra data.*; .* one row in each line"),
        ("torn.jsonl.gz", r"torn\.jsonl\.gz: must be a whole gzip file, as its first bytes say, but is not"),
        ("rows.parquet", r"rows\.parquet: must be a parquet file with rows, but cannot .* corresponds to no data"),
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
    missing = DatasetGenerationError("An error occurred while generating the dataset")
    missing.__cause__ = ImportError("please install 'teich'")
    for loaded, message in (
        (HTTPError("403 Forbidden"), "'a/set' is not a file, and its split 'test' cannot be loaded .*: 403 For"),
        (missing, "its split 'test' cannot be loaded from the hub: ImportError: please install 'teich'; correct"),
        ([broken], r"a/set: every row must be readable, but one is not \('utf-8' codec"),
    ):
        builder = Mock(as_dataset=Mock(side_effect=loaded))
        monkeypatch.setattr(conversations, "load_dataset_builder", Mock(return_value=builder))
        with pytest.raises(UserError, match=message):
            read_conversations(["a/set"], split="test")


def calling(answer: Any, **arguments: Any) -> dict[str, Any]:
    """Returns a row that `datasets` would take for traces of agents, with an answer and a call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer, "tool_calls": [call]}]
    return {"id": "a", "source": "x", "model": "m", "system_prompt": "Be brief.", "messages": messages}


def test_json_of_a_data_set_is_read_from_its_files_and_split_as_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["42", "null", '"Me."', "plain"]
    mixed = [*(calling(text, a=number or None) for number, text in enumerate(texts)), calling([{"type": "image"}])]
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", *mixed)
    write(tmp_path / "set" / "test.jsonl", MESSAGES)
    monkeypatch.setattr(conversations, "load_dataset_builder", lambda _: load_dataset_builder(str(tmp_path / "set")))
    found, local = read_conversations(["a/set"], split="train"), read_conversations([str(tmp_path / "set/train.jsonl")])
    assert [found.messages(i) for i in range(4)] == [local.messages(i) for i in range(4)]
    assert [found.messages(i)[-1]["content"] for i in range(4)] == texts and len(found.refused) == 1
    assert len(read_conversations(["a/set"], split="train[:2]+test").names) == 3
    with pytest.raises(UserError, match="split 'validation' cannot be loaded from the hub: ValueError: Unknown"):
        read_conversations(["a/set"], split="validation")


def test_texts_that_datasets_stored_as_json_are_named_and_their_added_quotes_stop_the_run(tmp_path: Path) -> None:
    """A file whose contents are of unlike types is written with the type Json, here by `datasets` itself."""
    path = tmp_path / "mixed.parquet"
    features = Features({"messages": List({"role": Value("string"), "content": Json()})})
    rows = [MESSAGES, {"messages": [MESSAGES["messages"][0], {"role": "assistant", "content": "42"}]}]
    Dataset.from_list(rows, features=features).to_parquet(path)
    with pytest.warns(UserWarning, match=r"mixed\.parquet: content should be text, but has the type Json of datasets"):
        found = read_conversations([str(path)])
    assert found.messages(0) == MESSAGES["messages"]
    assert found.refused == {f"{path}:2": "content must be text, but is int"}
    parts = {"messages": [*MESSAGES["messages"], {"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    files = [write(tmp_path / "plain.jsonl", MESSAGES), write(tmp_path / "mixed.jsonl", MESSAGES, parts, MESSAGES)]
    load_dataset("json", data_files=files, split="train", cache_dir=tmp_path).to_parquet(path)
    with pytest.raises(UserError, match=r"parquet:2: a row must hold its .*, as 2 rows of 4 do, all texts in the quo"):
        read_conversations([str(path)])
