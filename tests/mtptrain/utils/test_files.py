"""Tests that damaged JSON and safetensors files are refused by name, and that a failed write leaves nothing."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtptrain.utils.files import (
    file_sha256,
    parse_json,
    read_json,
    refuse_lone_surrogates,
    refuse_overwriting,
    save_tensors,
    tensor_shapes,
    write_text,
)
from tests.programs import largest_file

NESTED = b"[" * 100_000 + b"]" * 100_000
NOT_JSON = {
    "empty": (b"", r"must be JSON, but is not \(Expecting value"),
    "a repeated key": (b'{"a": {"b": 1, "c": 2, "b": 1}}', r"must be JSON, but is not \(key 'b' occurs twice"),
    "cut off": (b'{"a": ', r"must be JSON, but is not \(Expecting value"),
    "nested too deep": (NESTED, "must be JSON, but is nested too deep to be read; correct it"),
    "an integer of 5,000 digits": (b'{"a": ' + b"1" * 5000 + b"}", r"must be JSON, but is not \(Exceeds the limit"),
    "not UTF-8": (b'{"a": "\xf6"}', r"must be UTF-8, but is not \('utf-8' codec"),
}


@pytest.mark.parametrize("kind", NOT_JSON)
def test_a_file_that_is_not_json_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, message = NOT_JSON[kind]
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json: " + message):
        read_json(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"^a\.jsonl:3: " + message):
        parse_json(content, "a.jsonl:3")


def test_a_json_file_without_an_object_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"a\.json: must hold a JSON object, but holds a list; do that"):
        read_json(tmp_path / "a.json", "do that")


def test_a_json_object_without_a_required_entry_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "a.json", required=["a"]) == {"a": 1}
    with pytest.raises(ValueError, match=r"a\.json: must have the entries a, b, but lacks b; do that"):
        read_json(tmp_path / "a.json", "do that", ["a", "b"])


def test_a_file_that_is_too_large_to_be_an_output_is_kept_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mark")
    refuse_overwriting(tmp_path / "a", "--out", ["mark"])
    os.truncate(tmp_path / "a", 2**30 + 1)
    with pytest.raises(ValueError, match=r"^--out: must be a new file or an earlier output of .* is something else;"):
        refuse_overwriting(tmp_path / "a", "--out", ["mark"])


def test_the_hash_of_a_file_is_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    # The SHA-256 of "abc" is an example in FIPS 180-4.
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_safetensors_file_that_must_not_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Root may read every file, so the test uses a link to itself, which not even root can open."""
    path = tmp_path / "a.safetensors"
    path.symlink_to(path)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as raised:
        tensor_shapes(path)
    assert raised.value.filename == str(path)


def test_half_a_surrogate_pair_is_refused_anywhere_in_a_value() -> None:
    refuse_lone_surrogates({"a": ["\U0001f600", 1]}, "here")
    with pytest.raises(ValueError, match="here: texts must be valid Unicode, but one is not"):
        refuse_lone_surrogates({"a": [{"b\ud800": 1}]}, "here")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"hello",
        lambda content: bytes(range(128, 256)) * 4,
        lambda content: content[:40],
        lambda content: content[:-1],
        lambda content: content + b"0",
        lambda content: content[:7] + b"\x40" + content[8:],
        lambda content: content.replace(b'"dtype"', b'"d\xffype"'),
        lambda content: content.replace(b"[2,3]", b"[2,9]"),
    ],
    ids=(
        "empty",
        "short",
        "garbage",
        "half a header",
        "cut",
        "longer",
        "a header's length",
        "a header's text",
        "shape",
    ),
)
def test_a_damaged_safetensors_file_is_refused_by_name(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": torch.zeros(2, 3)})
    assert tensor_shapes(path) == {"x": ("F32", (2, 3))}
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"a\.safetensors: must be a complete safetensors file, but cannot be read \("):
        tensor_shapes(path)


@pytest.mark.parametrize(
    "write",
    [lambda path: write_text(path, "a" * 100_000), lambda path: save_tensors(path, {"x": torch.zeros(100_000)})],
    ids=["text", "tensors"],
)
def test_a_failed_write_names_its_file_and_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    (tmp_path / "a").write_text("old")
    with largest_file(1000), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as raised:
        write(tmp_path / "a")
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"
