"""Tests that damaged JSON and safetensors files are refused by name, and that a failed write leaves nothing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.responses.dialogue import RegeneratedConversation
from data_prep.responses.store import ResponsesStore
from mtptrain.stage_dir import StageDir
from mtptrain.training.metrics import Tracking
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import (
    parse_json,
    read_json,
    refuse_lone_surrogates,
    refuse_overwriting,
    save_tensors,
    tensor_shapes,
    write_text,
)
from tests.programs import largest_file

NOT_JSON = [
    (b'{"a": ', r"must be JSON, but is not \(Expecting value"),
    (b'{"a": {"b": 1, "c": 2, "b": 1}}', r"must be JSON, but is not \(key 'b' occurs twice"),
    (b"[" * 100_000 + b"]" * 100_000, "must be JSON, but is nested too deep to be read; correct it"),
    (b'{"a": ' + b"1" * 5000 + b"}", r"must be JSON, but is not \(Exceeds the limit"),
    (b'{"a": "\xf6"}', r"must be UTF-8, but is not \('utf-8' codec"),
]


def test_a_text_that_is_not_json_or_has_no_object_with_the_required_entries_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, message in NOT_JSON:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json: " + message):
            read_json(path)
        with pytest.raises(UserError, match=r"^a\.jsonl:3: " + message):
            parse_json(content, "a.jsonl:3")
    path.write_text("[1]")
    with pytest.raises(UserError, match=r"a\.json: must hold a JSON object, but holds a list; do that"):
        read_json(path, "do that")
    path.write_text('{"a": 1}')
    assert read_json(path, required=["a"]) == {"a": 1}
    with pytest.raises(UserError, match=r"a\.json: must have the entries a, b, but lacks b; do that"):
        read_json(path, "do that", ["a", "b"])
    refuse_lone_surrogates({"a": ["\U0001f600", 1]}, "here")
    with pytest.raises(UserError, match="here: texts must be valid Unicode, but one is not"):
        refuse_lone_surrogates({"a": [{"b\ud800": 1}]}, "here")


def test_a_file_that_is_too_large_to_be_an_output_is_kept_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mark")
    refuse_overwriting(tmp_path / "a", "--out", ["mark"])
    os.truncate(tmp_path / "a", 2**30 + 1)
    with pytest.raises(UserError, match=r"^--out: must be a new file or an earlier output of .* is something else;"):
        refuse_overwriting(tmp_path / "a", "--out", ["mark"])


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: b"",
    lambda content: content[:40],
    lambda content: content[:-1],
    lambda content: content + b"0",
    lambda content: content.replace(b'"dtype"', b'"d\xffype"'),
    lambda content: content.replace(b"[2,3]", b"[2,9]"),
]


def test_a_safetensors_file_that_is_damaged_or_must_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    path, link = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(path, {"x": torch.zeros(2, 3)})
    assert tensor_shapes(path) == {"x": ("F32", (2, 3))}
    whole = path.read_bytes()
    for damage in DAMAGES:
        path.write_bytes(damage(whole))
        with pytest.raises(UserError, match=r"a\.safetensors: must be a complete safetensors file, but cannot be re"):
            tensor_shapes(path)
    link.symlink_to(link)  # root may read every file, but cannot open a link to itself
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as raised:
        tensor_shapes(link)
    assert raised.value.filename == str(link)


def test_a_failed_write_names_its_file_and_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    writes: list[Callable[[Path], None]] = [
        lambda path: write_text(path, "a" * 100_000),
        lambda path: save_tensors(path, {"x": torch.zeros(100_000)}),
    ]
    (tmp_path / "a").write_text("old")
    for write in writes:
        with largest_file(1000), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as raised:
            write(tmp_path / "a")
        assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a")
        assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_file_that_grows_line_by_line_or_holds_a_lock_is_named_too(tmp_path: Path) -> None:
    answered, answer = ResponsesStore(tmp_path / "answered"), RegeneratedConversation(1, "chat1")
    answered.directory.mkdir()
    answered.append(0, answer)
    cases: dict[str, Callable[[], object]] = {
        "answers_00002.jsonl": lambda: ResponsesStore(tmp_path).append(2, answer),
        "answered/conversations.jsonl": lambda: answered.finish({}, {}, str),
        "metrics.jsonl": lambda: Tracking(tmp_path, 0, None).write(1, {}),
        "other/.mtptrain.lock": lambda: StageDir(tmp_path / "other").writing().__enter__(),
    }
    for name, write in cases.items():
        with largest_file(0), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as raised:
            write()
        assert raised.value.filename == str(tmp_path / name)
