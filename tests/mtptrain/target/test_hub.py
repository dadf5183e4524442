"""Tests that a target's identity changes with anything in it."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from mtptrain.data.identity import TargetIdentity
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import DEMO_DIR, weights_fingerprint
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer


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
