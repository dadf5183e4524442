"""Tests the files of prompts: what is written comes back, and what is damaged is named."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mtptrain.data.prompt_files import Documents, PromptsManifest, is_held_out, name_hash
from tests.sealed import seal_again, seal_prompts


def test_documents_come_back_as_they_were_saved_in_the_types_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    Documents.from_list([(4, [1, 2, 3], [0, 1, 1]), (7, [], []), (9, np.array([5]), np.array([1]))]).save(path)
    loaded = Documents.load(path)
    assert (len(loaded), loaded.lengths.tolist(), loaded.document_ids.tolist()) == (3, [3, 0, 1], [4, 7, 9])
    assert [loaded.token_ids(i).tolist() for i in range(3)] == [[1, 2, 3], [], [5]]
    assert [loaded.mask(i).tolist() for i in range(3)] == [[0, 1, 1], [], [1]]
    assert {name: array.dtype.name for name, array in load_file(path).items()} == {
        "input_ids": "int32", "loss_mask": "uint8", "document_offsets": "int64", "document_ids": "int64",
    }  # fmt: skip


def test_a_manifest_of_another_version_or_with_other_entries_is_refused(tmp_path: Path) -> None:
    written = "must be as mtptrain prompts writes it, but"
    for change, reason in (
        ({"schema_version": 99}, "schema_version must be 2, but is 99; run mtptrain prompts again"),
        ({"vocab_size": ...}, f"{written} lacks vocab_size"),
        ({"more": 1}, f"{written} has the unknown entry more"),
        ({"train_tokens": None}, f"{written} train_tokens is None"),
        ({"tokenizer": [1]}, rf"{written} tokenizer is \[1\] \(Input should be an object\)"),
        ({"tokenizer": {"tokenizer_sha256": "a"}}, rf"{written} lacks tokenizer\.chat_template_sha256"),
    ):
        seal_again(seal_prompts(tmp_path), **change)
        with pytest.raises(ValueError, match=rf"/manifest\.json: {reason}"):
            PromptsManifest.read(tmp_path)


def test_the_held_out_share_is_the_fraction_and_grows_with_it() -> None:
    names = [f"file_{i}.py" for i in range(10_000)]
    small, large = ({name for name in names if is_held_out(name, fraction)} for fraction in (0.05, 0.2))
    assert small < large
    assert (len(small), len(large)) == (pytest.approx(500, abs=100), pytest.approx(2000, abs=200))
    assert 0.0 <= min(map(name_hash, names)) < max(map(name_hash, names)) < 1.0
