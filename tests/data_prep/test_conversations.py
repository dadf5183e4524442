import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError

from data_prep import conversations
from data_prep.conversations import conversation_name, read_conversations
from mtptrain.config import ConversationSchema
from mtptrain.data.rows import RowFormat, parse_row
from mtptrain.utils.errors import UserError

MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_file_format_gives_the_same_conversations(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": f"row{i}", "conversations": SHAREGPT["conversations"]} for i in range(3)]
    path = tmp_path / f"chats.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, *rows)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        Dataset.from_list(rows).to_parquet(str(path))
    found = read_conversations([str(path)])
    assert found.names == ["row0", "row1", "row2"]
    assert found.messages(2) == parse_row(SHAREGPT)[0]


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", {"id": 1, **MESSAGES})
    second = write_jsonl(tmp_path / "b.jsonl", {"conversation_id": "two", **SHAREGPT})
    found = read_conversations([first, second])
    assert found.names == ["1", "two"]
    assert found.location(1) == f"{second}:1"


def test_copies_without_an_id_have_one_name_in_either_schema() -> None:
    one, other = (conversation_name(row, parse_row(row)[0]) for row in (MESSAGES, SHAREGPT))
    assert one == other
    changed = {"messages": [*MESSAGES["messages"], {"role": "user", "content": "more"}]}
    assert conversation_name(changed, parse_row(changed)[0]) != one


def test_refused_rows_are_listed_by_line_and_usable_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    odd = {"messages": [{"role": "narrator", "content": "hi"}]}
    path.write_text(
        f"{json.dumps(MESSAGES)}\n\n{json.dumps(odd)}\n{json.dumps({**MESSAGES, 'id': 'last'})}\n[1]\n"
        f"{json.dumps({**MESSAGES, 'id': chr(0xD83D)})}\n"
    )
    found = read_conversations([str(path)])
    assert len(found.names) == 2
    assert found.location(1) == f"{path}:4"
    assert found.refused == {
        f"{path}:3": "unknown role 'narrator'",
        f"{path}:5": "a row must be an object, but is a list",
        f"{path}:6": "text that is not valid Unicode",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "chats.jsonl",
            json.dumps(MESSAGES).encode() + b'\n{"messages": [\n',
            r"chats\.jsonl:2: must be JSON, but is not \(Expecting value.*; correct or remove it",
        ),
        ("chats.jsonl", b'{"messages": "gr\xf6\xdfe"}\n', r"chats\.jsonl:1: must be UTF-8, but is not \('utf-8' codec"),
        (
            "chats.jsonl",
            b"\n",
            r"every file must hold at least one usable row, but .*chats\.jsonl holds no row at all; c",
        ),
        ("chats.json", b"{}", r"chats\.json: must hold one array of rows, but holds an object"),
        ("chats.parquet", None, r"chats\.parquet: must be a parquet file with rows, but cannot be read"),
        ("chats.csv", b"a,b\n", r"files must end in \.jsonl, \.json, \.parquet, but '.*chats\.csv' does not"),
        (".", None, r"prompts\.paths: must name files or hub data sets, but .* is a directory; list its files"),
    ],
)
def test_a_file_that_cannot_be_read_or_has_no_rows_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if name == "chats.parquet":
        Dataset.from_list([MESSAGES]).select([]).to_parquet(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_conversations([str(tmp_path / name)])


def test_a_flipped_byte_in_a_parquet_file_is_read_or_refused_by_name(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    Dataset.from_list([MESSAGES] * 50).to_parquet(good)
    content, refused = good.read_bytes(), 0
    for place in range(0, len(content), len(content) // 40):
        path = tmp_path / f"{place}.parquet"
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x81]) + content[place + 1 :])
        try:
            read_conversations([str(path)])
        except ValueError as error:
            refused += 1
            assert str(error).startswith(str(path))
    assert refused > 10


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "hi", "answer": "yes"},
            "no column messages or conversations or conversation, but answer, prompt",
        ),
        (
            {"messages": [{"speaker": "me", "text": "hi"}]},
            "messages must have keys role, content or from, value, but one has keys speaker, text",
        ),
        (
            {"messages": ["hi"]},
            "messages must have keys role, content or from, value, but one is text",
        ),
        ({"messages": "hi"}, "column messages: text that is not a JSON list of messages"),
        ({"messages": {"role": "user"}}, "column messages must be a list of messages, but is an object"),
        ({"messages": None}, "no messages"),
        ([1, 2], "a row must be an object, but is a list"),
    ],
)
def test_a_file_whose_rows_are_all_refused_is_named_with_the_reasons(tmp_path: Path, row: Any, reason: str) -> None:
    odd = {"messages": [{"role": "narrator", "content": "hi"}]}
    path, good = write_jsonl(tmp_path / "chats.jsonl", odd, row, row), write_jsonl(tmp_path / "good.jsonl", MESSAGES)
    with pytest.raises(ValueError) as refused:
        read_conversations([good, path])
    assert str(refused.value) == (
        f"prompts.paths: every file must hold at least one usable row, but {path} holds none: 2 refused ({reason}), 1 "
        f"refused (unknown role 'narrator'); the first row is {path}:1; convert the data, or correct prompts.source, "
        "prompts.paths, prompts.schema or prompts.roles"
    )
    with_good = write_jsonl(tmp_path / "mixed.jsonl", row, MESSAGES)
    assert read_conversations([with_good]).refused == {f"{with_good}:1": reason}


def test_a_system_prompt_in_a_column_distinguishes_questions(tmp_path: Path) -> None:
    system = {"system_prompt": "Talk like a pirate."}
    inside = {"conversations": [{"from": "system", "value": "Talk like a pirate."}, *SHAREGPT["conversations"]]}
    path = write_jsonl(tmp_path / "chats.jsonl", SHAREGPT, {**SHAREGPT, **system}, inside)
    plain, by_column, by_message = read_conversations([path]).groups
    assert plain != by_column == by_message


def test_a_schema_that_the_config_names_is_required(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", SHAREGPT)
    with pytest.raises(ValueError, match="messages must have keys role, content, but one has keys from, value"):
        read_conversations([path], RowFormat(ConversationSchema.messages))
    assert len(read_conversations([path], RowFormat(ConversationSchema.sharegpt)).names) == 1


@pytest.mark.parametrize("path", ["/no/such/chats.jsonl", "chats.parquet", "/no/such/place"])
def test_a_file_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(
        UserError, match=rf"prompts\.paths: must name files or hub data sets, but '{path}' does not exist"
    ):
        read_conversations([path])


def test_a_hub_name_that_cannot_be_loaded_is_named_with_the_hubs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    match = (
        r"'nobody/no-such-set' is not a file, and its split 'test' cannot be loaded from the hub: .*; correct "
        r"prompts\.paths"
    )
    with pytest.raises(UserError, match=match):
        read_conversations(["nobody/no-such-set"], split="test")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Dataset scripts are no longer supported"), "Dataset scripts are no longer supported"),
        (DatasetGenerationError("rows differ"), "rows differ"),
        (OSError("401 Client Error.\n\nCannot access the set."), r"401 Client Error\. Cannot access the set\."),
        (HTTPError("403 Forbidden"), "403 Forbidden"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_data_set_that_cannot_be_made_is_named_with_the_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(path: str, split: str) -> Dataset:
        raise error

    monkeypatch.setattr(conversations, "load_dataset", load_dataset)
    message = f"cannot be loaded from the hub: {reason}; correct .*, log in with .*, or download it as parquet"
    with pytest.raises(UserError, match=message):
        read_conversations(["some/set"])
