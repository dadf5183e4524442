"""Tests that the published MTP modules of all known families are read as head `native_mtp`, and written back equal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.formats import format_for
from mtptrain.convert.target_files import INDEX
from mtptrain.convert.warm_start import load_init, trained_or_initial_head
from mtptrain.export import check_tensors, write_head
from mtptrain.heads.files import TARGET_WEIGHTS, load_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NATIVE_MTP, NativeMtpHead
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from tests.native_modules import LAST, MODULES, published_names, write_checkpoint

CONFIG = NativeMtpHead.Config()


def test_every_known_family_is_tested() -> None:
    assert MODULES.keys() == NATIVE_MTP.keys()


@pytest.mark.parametrize("family", MODULES)
def test_a_published_module_is_read_and_written_back_as_it_was(tmp_path: Path, family: str) -> None:
    config, state = write_checkpoint(tmp_path / "target", family)
    before, stored = load_file(tmp_path / "target/model.safetensors"), tmp_path / "target/config.json"
    found = load_init(str(tmp_path / "target"), CONFIG, TargetFiles(tmp_path / "target"))
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)

    form, directory = format_for("vllm", CONFIG, config), tmp_path / "export"
    write_head(directory, form, {name: tensor + 1 for name, tensor in state.items()})
    form.add_target(directory, tmp_path / "target")
    check_tensors(directory, form)
    files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    written = load_file(directory / form.weights_name)
    assert written.keys() == published_names(family)
    for name, tensor in before.items():
        is_of_module = name in published_names(family)
        assert files[name] == (form.weights_name if is_of_module else "target.safetensors")
        assert torch.equal(load_file(directory / files[name])[name], tensor + 1 if is_of_module else tensor)
    assert files.keys() == before.keys()
    assert json.loads((directory / "config.json").read_text()) == json.loads(stored.read_text())


def test_a_module_in_bf16_keeps_its_dtypes_and_the_exact_bias_of_its_router(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "target", "glm4_moe")
    path, bias = tmp_path / "target/model.safetensors", f"model.layers.{LAST}.mlp.gate.e_score_correction_bias"
    stored = {name: x if name.endswith("bias") else x.bfloat16() for name, x in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    target = TargetFiles(tmp_path / "target")
    read = trained_or_initial_head(
        tmp_path / "none", NativeMtpHead.Config(init_from=str(tmp_path / "target")), target, None, torch.device("cpu")
    )
    save_head(tmp_path / "best", read.head.state_dict(), CONFIG, {TARGET_WEIGHTS: target.weights_sha256})
    head = load_head(tmp_path / "best", CONFIG, config, None, torch.device("cpu"))
    form = format_for("vllm", CONFIG, config)
    write_head(tmp_path / "export", form, head.state_dict())
    written = load_file(tmp_path / "export" / form.weights_name)
    assert written[bias].dtype is torch.float32 and torch.equal(written[bias], stored[bias])
    assert all(
        x.dtype is torch.bfloat16 and torch.equal(x, stored[name]) for name, x in written.items() if name != bias
    )


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_a_checkpoint_without_a_module_gets_one_and_is_still_the_target(tmp_path: Path, family: str) -> None:
    config, state = write_checkpoint(tmp_path / "target", family)
    tensors = load_file(tmp_path / "target/model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("mtp.", f"model.layers.{LAST}."))}
    save_file(kept, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    stored = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps(stored | {"num_nextn_predict_layers": 0}))
    form, directory = format_for("vllm", CONFIG, config), tmp_path / "export"
    write_head(directory, form, state)
    form.add_target(directory, tmp_path / "target")
    assert json.loads((directory / "config.json").read_text()) == stored | {"num_nextn_predict_layers": 1}
    ours, theirs = (load_target(path, torch.float32, torch.device("cpu")) for path in (tmp_path / "target", directory))
    assert all(torch.equal(ours.model.state_dict()[name], x) for name, x in theirs.model.state_dict().items())
    found = load_init(str(directory), CONFIG, TargetFiles(directory))
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_experts_that_are_stored_joined_are_read_too(tmp_path: Path) -> None:
    _, state = write_checkpoint(tmp_path, "qwen3_5_moe_text")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.layers.0.mlp.experts.")}
    joined = {
        name.replace("model.layers.0.", "mtp.layers.0."): tensor
        for name, tensor in state.items()
        if ".experts." in name
    }
    assert len(joined) == 2
    save_file(tensors | joined, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_next",
            without("mtp."),
            r"must hold every tensor of its MTP module, of which its config\.json declares 1 "
            r"\(num_nextn_predict_layers or mtp_num_hidden_layers\), but lacks mtp\.fc\.weight, "
            r"mtp\.layers\.0\.input_layernorm\.weight, .* and \d+ more; download the files that hold them",
        ),
        (
            "glm4_moe",
            without(f"model.layers.{LAST}.mlp.experts.3.up_proj"),
            rf"but lacks model\.layers\.{LAST}\.mlp\.experts\.3\.up_proj\.weight; download",
        ),
        ("ernie4_5_moe", without("model.mtp_linear_proj"), r"but lacks model\.mtp_linear_proj\.0\.weight; download"),
        (
            "deepseek_v3",
            lambda tensors: {
                **tensors,
                f"model.layers.{LAST}.eh_proj.weight": torch.zeros(64, 128, dtype=torch.float8_e4m3fn),
            },
            r"must have numbers of 16 bits or more, .*eh_proj\.weight has torch\.float8_e4m3fn; choose the checkpoint",
        ),
        (
            "qwen3_5_text",
            lambda tensors: {**tensors, "mtp.fc.bias": torch.ones(64)},
            r"mtp\.fc\.bias of .* must be zero, because the head has no such bias",
        ),
        (
            "qwen3_5_text",
            lambda tensors: {**tensors, "mtp.fc.weight": torch.ones(64, 64)},
            r"eh_proj\.weight of .* must be of shape \(64, 128\) for head native_mtp",
        ),
    ],
    ids=["all", "an expert", "a projection", "fp8", "a bias", "a shape"],
)
def test_a_module_that_is_not_whole_is_refused_by_the_names_of_its_tensors(
    tmp_path: Path, family: str, change: Callable[[Tensors], Tensors], message: str
) -> None:
    write_checkpoint(tmp_path, family)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_head_mtp_names_the_head_that_reads_such_a_module(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path, family)
    with pytest.raises(ValueError, match="set head=native_mtp"):
        load_init(str(tmp_path), MtpHead.Config(), TargetFiles(tmp_path))


def test_a_family_without_known_modules_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=r"must be of a family whose MTP modules are known \(deepseek_v3, .*but is a"):
        load_init(str(tiny_target), CONFIG, TargetFiles(tiny_target))


def test_copies_of_the_targets_tensors_that_differ_are_warned_of(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{LAST}.shared_head.head.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"shared_head\.head\.weight should equal the target's, which is used"):
        load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))
