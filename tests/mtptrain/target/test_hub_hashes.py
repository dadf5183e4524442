"""Tests that weights damaged by a download are found by the hub's hashes."""

import json
import shutil
from pathlib import Path

import pytest

from mtptrain.target.hub_hashes import verify_weights
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256
from tests.sealed import flip_bit

NAME = "model.safetensors"


def in_own_directory(target: Path) -> Path:
    """Lays the target out as `hf download --local-dir` does, and returns the file with its weights."""
    metadata = target / ".cache/huggingface/download" / f"{NAME}.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"{'a' * 40}\n{file_sha256(target / NAME)}\n1700000000.0\n")
    return target / NAME


def in_cache(target: Path) -> Path:
    """Lays the target out as `snapshot_download` does, with a link to a blob, and returns the blob."""
    blob = target.parent / "blobs" / file_sha256(target / NAME)
    blob.parent.mkdir()
    shutil.move(target / NAME, blob)
    (target / NAME).symlink_to(blob)
    return blob


def test_a_flipped_byte_is_found_by_the_hubs_hash(tmp_path: Path, tiny_target: Path) -> None:
    for download in (in_own_directory, in_cache):
        target = shutil.copytree(tiny_target, tmp_path / download.__name__ / "target")
        with pytest.raises(UserError, match=r"^target\.verify: the hub's hashes .* must be known, but .* has none"):
            verify_weights(target)
        path = download(target)
        verify_weights(target)
        shutil.copy(target / NAME, target / "other.safetensors")
        index = target / f"{NAME}.index.json"
        index.write_text(json.dumps({"weight_map": {"a": NAME, "b": "other.safetensors"}}))
        with pytest.warns(UserWarning, match=r"^target\.verify: all 2 weight files .*, but 1 have none, such as other"):
            verify_weights(target)
        index.unlink()
        flip_bit(path, -100)
        with pytest.raises(UserError, match=r"safetensors: must have the hub's sha256 \w{64}, but has \w{64}; down"):
            verify_weights(target)
