"""Tests that the hub's hashes find damaged weights, and that a target's identity changes with anything in it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mtptrain.data.identity import TargetIdentity
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import DEMO_DIR, weights_fingerprint
from mtptrain.target.hub_hashes import verify_weights
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer
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


def identity(directory: Path) -> TargetIdentity:
    return TargetIdentity.of(TargetFiles(directory, "name"))


def test_identity_tells_weights_config_tokenizer_and_template_apart(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path / "base"))
    assert identity(make_target(tmp_path / "again")) == base
    other_weights = identity(make_target(tmp_path / "weights", seed=1))
    assert other_weights.weights_sha256 != base.weights_sha256 and other_weights.config_sha256 == base.config_sha256
    assert identity(make_target(tmp_path / "config", rms_norm_eps=1e-4)).config_sha256 != base.config_sha256
    template = identity(make_target(tmp_path / "template", chat_template=GENERATION_TEMPLATE + " "))
    assert template.chat_template_sha256 != base.chat_template_sha256
    assert template.tokenizer_sha256 == base.tokenizer_sha256
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert identity(tmp_path / "again").tokenizer_sha256 != base.tokenizer_sha256


def test_a_change_to_any_one_tensor_changes_the_identity(tmp_path: Path) -> None:
    path = Path(shutil.copytree(DEMO_DIR, tmp_path / "target")) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path)
    base = weights_fingerprint(path.parent)
    for changed in tensors:
        save_file({name: tensor * 1.5 if name == changed else tensor for name, tensor in tensors.items()}, path)
        assert weights_fingerprint(path.parent) != base, changed
