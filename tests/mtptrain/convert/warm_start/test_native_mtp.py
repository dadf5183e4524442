"""Tests that the MTP layer of a checkpoint is read without the rest, and refused if head `mtp` differs from it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.warm_start import load_init
from mtptrain.target.files import TargetFiles
from tests.conftest import make_target
from tests.mtptrain.convert.warm_start.written_heads import MTP, assert_equal, random_state, rewrite, unchanged


def native_checkpoint(directory: Path, target_dir: Path, layers: tuple[int, ...] = (2,)) -> Tensors:
    """Write a target of two layers and equal MTP layers in DeepSeek's layout, and return the weights of one."""
    make_target(directory)
    state = random_state(MTP, target_dir)
    tensors = load_file(directory / "model.safetensors")
    for layer in layers:
        names = {"norm.weight": "shared_head.norm.weight"}
        tensors |= {f"model.layers.{layer}.{names.get(name, name)}": tensor.clone() for name, tensor in state.items()}
        embeddings = tensors["model.embed_tokens.weight"]
        tensors |= {
            f"model.layers.{layer}.{name}": embeddings.clone()
            for name in ("embed_tokens.weight", "shared_head.head.weight")
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return state


def test_the_mtp_layer_of_a_checkpoint_is_read_without_the_rest_of_it(tmp_path: Path, tiny_target: Path) -> None:
    state = native_checkpoint(tmp_path / "target", tiny_target)
    assert_equal(load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target)), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.2.self_attn.q_norm.weight": torch.ones(64)},
            r"self_attn\.q_norm\.weight of .* must be absent for head mtp and this target, but is of shape \(64,\); "
            r"choose another",
        ),
        (
            {"model.layers.2.self_attn.q_proj.bias": torch.ones(64)},
            r"self_attn\.q_proj\.bias of .* must be zero, because the head has no such bias, but is not; choose "
            r"another head",
        ),
        (
            {"model.layers.3.eh_proj.weight": torch.ones(64, 128)},
            r"must hold one MTP layer, as head mtp has, but .* has 2 \(model\.layers\.2\., model\.layers\.3\.\); "
            r"choose another",
        ),
        (
            {"model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(96, 64)},
            r"must be dense and have plain attention, as head mtp has, .*target has experts; set head=native_mtp",
        ),
        (
            {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.ones(64, 64)},
            r"must be dense and have plain attention, as head mtp has, .* has latent attention; set head=native_mtp",
        ),
    ],
    ids=["q_norm", "bias", "two", "experts", "latent attention"],
)
def test_an_mtp_layer_with_parts_that_our_head_does_not_have_is_refused(
    tmp_path: Path, tiny_target: Path, change: Tensors, message: str
) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    rewrite(tmp_path / "target", lambda tensors: {**tensors, **change})
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target))


@pytest.mark.parametrize("layer", [1, 9])
def test_an_mtp_layer_that_is_not_behind_the_targets_layers_is_refused(
    tmp_path: Path, tiny_target: Path, layer: int
) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    rewrite(
        tmp_path / "target",
        lambda tensors: {name.replace("layers.2.", f"layers.{layer}."): x for name, x in tensors.items()},
    )
    with pytest.raises(
        ValueError, match=rf"must be model\.layers\.2, behind .*, but is model\.layers\.{layer}; choose"
    ):
        load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target))


def test_a_norm_under_two_names_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    change = {f"model.layers.2.{name}": torch.ones(64) for name in ("norm.weight", "shared_head.norm.weight")}
    rewrite(tmp_path / "target", lambda tensors: {**tensors, **change})
    with pytest.raises(ValueError, match=r"a tensor must have one name, but .* are both norm\.weight"):
        load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target))


def test_an_mtp_layer_in_the_layout_of_qwen3_next_is_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    make_target(tmp_path / "target")
    rewrite(
        tmp_path / "target",
        lambda tensors: {**tensors, "mtp.fc.weight": torch.ones(64, 128)},
        architectures=["Qwen3NextForCausalLM"],
    )
    with pytest.raises(
        ValueError,
        match=r"an MTP layer must have DeepSeek's or MiMo's layout .* that of the Qwen3NextForCausalLM in .*/target "
        r"has another one \(mtp\.\*\); set head=native_mtp",
    ):
        load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target))


def test_an_mtp_layer_that_reads_the_hidden_state_first_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    rewrite(tmp_path / "target", unchanged, mtp_hidden_states_first=True)
    with pytest.raises(
        ValueError,
        match=r"mtp_hidden_states_first must be false, because eh_proj of head mtp reads the embedding first",
    ):
        load_init(str(tmp_path / "target"), MTP, TargetFiles(tiny_target))


def test_a_tensor_in_two_files_is_refused_unless_the_index_names_one(tmp_path: Path, tiny_target: Path) -> None:
    directory, index = tmp_path / "target", tmp_path / "target/model.safetensors.index.json"
    state = native_checkpoint(directory, tiny_target)
    name = "model.layers.2.eh_proj.weight"
    save_file({name: torch.zeros(64, 128)}, directory / "zz.safetensors")
    with pytest.raises(ValueError, match=r"zz\.safetensors: model\.layers\.2\.\w+\.weight must be in one file only"):
        load_init(str(directory), MTP, TargetFiles(tiny_target))
    index.write_text(json.dumps({"weight_map": {name: "model.safetensors"}}))
    assert_equal(load_init(str(directory), MTP, TargetFiles(tiny_target)), state)
    index.write_text(json.dumps({"weight_map": {name: "absent.safetensors"}}))
    with pytest.raises(ValueError, match=r"must name files beside it, but absent\.safetensors is missing"):
        load_init(str(directory), MTP, TargetFiles(tiny_target))
