import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from mtptrain.data.prompt_files import (
    DocumentEntry,
    Documents,
    PromptsManifest,
    Split,
    is_held_out,
    name_hash,
)
from tests.sealed import seal_again, seal_prompts


def test_documents_come_back_as_they_were_saved(tmp_path: Path) -> None:
    Documents.from_list([(4, [1, 2, 3], [0, 1, 1]), (7, [], []), (9, [5], [1])]).save(tmp_path / "train.safetensors")
    loaded = Documents.load(tmp_path / "train.safetensors")
    assert len(loaded) == 3
    assert loaded.lengths.tolist() == [3, 0, 1]
    assert loaded.document_ids.tolist() == [4, 7, 9]
    assert [loaded.token_ids(i).tolist() for i in range(3)] == [[1, 2, 3], [], [5]]
    assert [loaded.mask(i).tolist() for i in range(3)] == [[0, 1, 1], [], [1]]


def test_the_file_has_the_types_of_the_format(tmp_path: Path) -> None:
    Documents.from_list([(0, np.array([1, 2]), np.array([1, 1]))]).save(tmp_path / "train.safetensors")
    with safe_open(tmp_path / "train.safetensors", framework="np") as file:
        dtypes = {name: file.get_tensor(name).dtype.name for name in file.keys()}  # noqa: SIM118
    assert dtypes == {"input_ids": "int32", "loss_mask": "uint8", "document_offsets": "int64", "document_ids": "int64"}


def test_a_split_can_be_read_by_those_who_can_read_other_files_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    Documents.from_list([(0, [1], [1])]).save(tmp_path / "train.safetensors")
    assert stat.S_IMODE((tmp_path / "train.safetensors").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )


def test_a_truncated_split_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    Documents.from_list([(0, [1, 2, 3], [1, 1, 1])]).save(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        ValueError, match=r"train\.safetensors: must be a split of prompts, but is not: .*run mtptrain prompts again"
    ):
        Documents.load(path)


def test_document_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    entries = [
        DocumentEntry(0, "größe.py", Split.validation, 17, 0),
        DocumentEntry(1, "b\u2028.py", Split.train, 5, 3, 4, "asked"),
    ]
    DocumentEntry.write_all(tmp_path, entries)
    assert DocumentEntry.read_all(tmp_path) == entries
    first = json.loads((tmp_path / "documents.jsonl").read_text().splitlines()[0])
    assert first == {
        "id": 0,
        "name": "größe.py",
        "split": "validation",
        "tokens": 17,
        "window": 0,
        "turn": 0,
        "group": "größe.py",
    }


@pytest.mark.parametrize("line", ["{}", "[1]", "5", '{"split": "other"}'])
def test_a_damaged_document_entry_is_named(tmp_path: Path, line: str) -> None:
    DocumentEntry.write_all(tmp_path, [DocumentEntry(0, "a.py", Split.train, 5, 0)])
    path = tmp_path / "documents.jsonl"
    path.write_text(path.read_text() + line + "\n")
    message = r"documents\.jsonl:2: must be the entry of a document, but is not \(.*\); run mtptrain prompts again"
    with pytest.raises(ValueError, match=message):
        DocumentEntry.read_all(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    seal_again(seal_prompts(tmp_path), schema_version=99)
    with pytest.raises(
        ValueError, match=r"manifest\.json: schema_version must be 2, but is 99; run mtptrain prompts again"
    ):
        PromptsManifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"more": 1}, "has the unknown entry more"),
        ({"train_tokens": None}, "train_tokens is None"),
        ({"tokenizer": [1]}, "tokenizer is a list, not an object"),
        ({"tokenizer": {"tokenizer_sha256": "a"}}, r"lacks tokenizer\.chat_template_sha256"),
    ],
)
def test_a_manifest_with_other_entries_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    seal_again(seal_prompts(tmp_path), **change)
    message = rf"/manifest\.json: must be as mtptrain prompts writes it, but {reason}; run mtptrain pro"
    with pytest.raises(ValueError, match=message):
        PromptsManifest.read(tmp_path)


def test_the_held_out_share_is_the_fraction_and_grows_with_it() -> None:
    names = [f"file_{i}.py" for i in range(10_000)]
    small, large = ({name for name in names if is_held_out(name, fraction)} for fraction in (0.05, 0.2))
    assert small < large
    assert len(small) == pytest.approx(500, abs=100)
    assert len(large) == pytest.approx(2000, abs=200)
    assert 0.0 <= min(map(name_hash, names)) < max(map(name_hash, names)) < 1.0
