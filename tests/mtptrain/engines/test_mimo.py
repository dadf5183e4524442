"""Tests that the MTP layer of a MiMo checkpoint is read, and is replaced in an export."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.engines.mimo import MIMO_LAYER
from mtptrain.heads.base import Tensors
from mtptrain.init_from.start import load_init
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from tests.conftest import make_target
from tests.mimo import MIMO_HEAD, add_mimo_layer
from tests.mtptrain.engines.conftest import export_head, random_head


@pytest.fixture
def target(tmp_path: Path) -> tuple[Path, Tensors]:
    """Returns a tiny MiMo target with an MTP layer, and the layer's tensors under the names of head `mtp`."""
    directory = make_target(tmp_path / "target", "mimo")
    return directory, add_mimo_layer(directory)


def export(directory: Path, target_dir: Path) -> Tensors:
    """Writes a random head into a copy of the checkpoint, and returns the head's weights."""
    state = random_head(MIMO_HEAD, read_target_config(target_dir)).state_dict()
    export_head(directory, "vllm", MIMO_HEAD, state, target_dir)
    return state


def test_the_export_is_the_checkpoint_with_another_mtp_layer(target: tuple[Path, Tensors], tmp_path: Path) -> None:
    directory, layer = target
    state = export(tmp_path / "export", directory)
    assert all(not torch.equal(state[name], layer[name]) for name in layer)
    index = json.loads((tmp_path / "export/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "export").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    tensor_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    assert index["metadata"] == {"total_size": tensor_bytes}
    before = load_file(directory / "model.safetensors")
    after = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert after.keys() == before.keys() and sum(map(len, files.values())) == len(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) != name.startswith(MIMO_LAYER), name
    again = load_init(str(tmp_path / "export"), MIMO_HEAD, TargetFiles(directory))[1]
    assert all(torch.equal(again[name], state[name]) for name in state)
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert "auto_map" not in config and str(tmp_path) not in json.dumps(config)


def test_shards_without_mtp_tensors_are_links_and_a_shard_of_mtp_tensors_alone_is_left_out(
    target: tuple[Path, Tensors], tmp_path: Path
) -> None:
    directory, _ = target
    tensors = load_file(directory / "model.safetensors")
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(MIMO_LAYER)}
    sharded = load_target(directory, torch.float32, torch.device("cpu")).model
    sharded.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    index_path = tmp_path / "sharded/model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    save_file(layer, tmp_path / "sharded/of_mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(layer, "of_mtp.safetensors")
    index_path.write_text(json.dumps(index))
    export(tmp_path / "export", tmp_path / "sharded")
    assert {path.name for path in (tmp_path / "export").glob("*.safetensors")} == {*shards, "mtp.safetensors"}
    assert all(os.path.samefile(tmp_path / "sharded" / name, tmp_path / "export" / name) for name in shards)
