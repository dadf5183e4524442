"""Tests that the published MTP modules of all known families are read as head `native_mtp`, and written back equal."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.engines.table import format_for
from mtptrain.engines.target_files import INDEX
from mtptrain.export import check_tensors, write_head
from mtptrain.heads.base import Tensors
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NATIVE_MTP, NativeMtpHead
from mtptrain.init_from.start import load_head, load_init, trained_or_initial_head
from mtptrain.target.files import TargetFiles
from tests.conftest import tiers
from tests.families import IMAGE_MODELS, write_image_model
from tests.mtptrain.init_from.written_heads import assert_equal, without
from tests.native_modules import MODULES, NUM_LAYERS, published_names, write_checkpoint

CONFIG, CPU = NativeMtpHead.Config(), torch.device("cpu")
BEHIND = f"model.layers.{NUM_LAYERS}."
EXPERT = f"{BEHIND}mlp.experts.3.up_proj.weight"


def change(directory: Path, changed: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    save_file(changed(load_file(path)), path, metadata={"format": "pt"})


def read(directory: Path) -> Tensors:
    return load_init(str(directory), CONFIG, TargetFiles(directory))[1]


def export(directory: Path, state: Tensors, target: TargetFiles) -> dict[str, str]:
    """Export a module, and return the file of each tensor."""
    form = format_for("vllm", CONFIG, target.config)
    write_head(directory, form, state)
    form.add_target(directory, target.directory)
    check_tensors(directory, form)
    files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return files


@pytest.mark.parametrize("family", tiers(MODULES, core=["glm4_moe"]))
def test_a_published_module_is_read_and_written_back_as_it_was(tmp_path: Path, family: str) -> None:
    assert MODULES.keys() == NATIVE_MTP.keys()
    target = tmp_path / "target"
    _, state = write_checkpoint(target, family)
    before = load_file(target / "model.safetensors")
    assert_equal(read(target), state)
    assert published_names(family, before) <= before.keys()
    files = export(tmp_path / "export", {name: tensor + 1 for name, tensor in state.items()}, TargetFiles(target))
    assert files.keys() == before.keys()
    for name, tensor in before.items():
        is_of_module = name in published_names(family, before)
        assert files[name] == ("mtp.safetensors" if is_of_module else "target.safetensors")
        written = load_file(tmp_path / "export" / files[name])[name]
        assert torch.equal(written, tensor + 1 if is_of_module else tensor)
    assert json.loads((tmp_path / "export/config.json").read_text()) == json.loads((target / "config.json").read_text())


@pytest.mark.slow
def test_a_module_in_bf16_keeps_its_dtypes_and_the_exact_bias_of_its_router(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", "glm4_moe")
    bias = f"{BEHIND}mlp.gate.e_score_correction_bias"
    change(tmp_path / "target", lambda x: {n: t if n.endswith("bias") else t.bfloat16() for n, t in x.items()})
    target = TargetFiles(tmp_path / "target")
    found = trained_or_initial_head(tmp_path, replace(CONFIG, init_from=str(target.directory)), target, None, CPU)
    save_head(tmp_path / "best", found.head.state_dict(), CONFIG, {TARGET_WEIGHTS: target.weights_sha256})
    export(tmp_path / "export", load_head(str(tmp_path / "best"), CONFIG, target, None, CPU)[1].state_dict(), target)
    written, stored = (load_file(tmp_path / name) for name in ("export/mtp.safetensors", "target/model.safetensors"))
    assert written[bias].dtype is torch.float32 and written["model.layers.4.eh_proj.weight"].dtype is torch.bfloat16
    assert all(x.dtype is stored[name].dtype and torch.equal(x, stored[name]) for name, x in written.items())


@pytest.mark.slow
def test_the_biases_of_a_modules_attention_are_its_own(tmp_path: Path) -> None:
    """GLM-4.5 has them."""
    for family in ("glm4_moe", "deepseek_v3", "qwen3_5_text"):
        _, state = write_checkpoint(tmp_path / family, family, attention_bias=True)
        assert any(name.endswith("_proj.bias") for name in state)
        assert_equal(read(tmp_path / family), state)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_a_checkpoint_without_a_module_gets_one_and_is_still_the_target(tmp_path: Path, family: str) -> None:
    _, state = write_checkpoint(tmp_path / "target", family)
    change(tmp_path / "target", lambda tensors: without("mtp.")(without(BEHIND)(tensors)))
    kept = load_file(tmp_path / "target/model.safetensors")
    stored = json.loads((tmp_path / "target/config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "target/config.json").write_text(json.dumps(stored))
    files = export(tmp_path / "export", state, TargetFiles(tmp_path / "target"))
    assert json.loads((tmp_path / "export/config.json").read_text()) == stored | {"num_nextn_predict_layers": 1}
    assert all(torch.equal(load_file(tmp_path / "export" / files[name])[name], x) for name, x in kept.items())
    assert_equal(read(tmp_path / "export"), state)


@pytest.mark.slow
def test_files_and_configs_of_targets_may_be_named_and_nested_otherwise(tmp_path: Path) -> None:
    _, state = write_checkpoint(tmp_path / "target", "glm4_moe")
    stored = load_file(tmp_path / "target/model.safetensors")
    (tmp_path / "target/model.safetensors").rename(tmp_path / "target/mtp.safetensors")  # the name of the head's file
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "mtp.safetensors")}
    (tmp_path / "target" / INDEX).write_text(json.dumps(index))
    files = export(tmp_path / "export", state, TargetFiles(tmp_path / "target"))
    assert files["lm_head.weight"] == "target-mtp.safetensors" and files.keys() == stored.keys()

    family, settings = IMAGE_MODELS["qwen3_5"]
    write_image_model(tmp_path / "image", family, settings)
    config = json.loads((tmp_path / "image/config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    (tmp_path / "image/config.json").write_text(json.dumps(config))
    target = TargetFiles(tmp_path / "image")
    state = build_head(CONFIG, target.config).state_dict()
    export(tmp_path / "with_module", state, target)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    assert json.loads((tmp_path / "with_module/config.json").read_text()) == config
    assert_equal(read(tmp_path / "with_module"), state)


def test_experts_that_are_stored_joined_are_read_too(tmp_path: Path) -> None:
    _, state = write_checkpoint(tmp_path, "qwen3_5_moe_text")
    joined = {name.replace("model.layers.0.", "mtp.layers.0."): x for name, x in state.items() if ".experts." in name}
    assert len(joined) == 2
    change(tmp_path, lambda tensors: without("mtp.layers.0.mlp.experts.")(tensors) | joined)
    assert_equal(read(tmp_path), state)
    change(tmp_path, lambda tensors: tensors | {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(32, 64)})
    with pytest.raises(ValueError, match=r"up_proj\.weight of the target's MTP module must be absent"):
        read(tmp_path)


E8 = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
REFUSED: dict[str, list[tuple[Callable[[Tensors], Tensors], str]]] = {
    "qwen3_5_text": [
        (
            without("mtp."),
            r"mtp\.fc\.weight of the target's MTP module must be of shape \(64, 128\), but is absent; ",
        ),
        (lambda x: {**x, "mtp.fc.bias": torch.ones(64)}, r"mtp\.fc\.bias of .* must be absent, but is of shape"),
        (lambda x: {**x, "mtp.fc.weight": torch.ones(64, 64)}, r"mtp\.fc\.weight of .* must be of shape \(64, 128\)"),
    ],
    "glm4_moe": [
        (without(EXPERT), r"model\.layers\.4\.mlp\.experts\.3\.up_proj\.weight of .* but is absent; choose"),
        (
            lambda x: {**x, f"{BEHIND}eh_proj.weight": E8},
            r"eh_proj\.weight must hold floating-point .* has torch\.float8_e4",
        ),
        (
            lambda x: {**without(EXPERT)(x), f"{EXPERT}_packed": torch.ones(32, 8, dtype=torch.int32)},
            r"up_proj\.weight_packed must hold floating-point numbers of 16 bits or more, .*torch\.int32; choose",
        ),
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_module_that_is_not_whole_is_refused_by_the_names_of_its_tensors(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    for changed, message in REFUSED[family]:
        save_file(changed(stored), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="set head=native_mtp"):
        load_init(str(tmp_path), MtpHead.Config(), TargetFiles(tmp_path))
    if family == "glm4_moe":
        change(tmp_path, lambda x: {**x, f"{BEHIND}shared_head.head.weight": 2 * x[f"{BEHIND}shared_head.head.weight"]})
        with pytest.warns(UserWarning, match=r"shared_head\.head\.weight should equal the target's, which is used"):
            read(tmp_path)


def test_a_family_without_known_modules_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=r"must be of a family whose MTP modules are known \(deepseek_v3, .*but is a"):
        read(tiny_target)
