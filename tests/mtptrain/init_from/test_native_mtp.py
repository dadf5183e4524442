"""Tests that the published MTP modules of all known families are read as head `native_mtp`, and written back equal."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.heads.base import Tensors
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NATIVE_MTP, NativeMtpHead
from mtptrain.init_from.start import load_head, load_init, trained_or_initial_head
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import INDEX
from tests.conftest import tiers
from tests.families import IMAGE_MODELS, write_image_model
from tests.mtptrain.engines.conftest import export_head
from tests.mtptrain.init_from.written_heads import assert_equal, without
from tests.native_modules import MODULES, NUM_LAYERS, write_checkpoint

CONFIG, CPU = NativeMtpHead.Config(), torch.device("cpu")
BEHIND = f"model.layers.{NUM_LAYERS}."
EXPERT = f"{BEHIND}mlp.experts.3.up_proj.weight"
OF_MODULES, COPIES = (BEHIND, "mtp.", "model.mtp"), ("embed_tokens.weight", "shared_head.head.weight")


def change(directory: Path, changed: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    save_file(changed(load_file(path)), path, metadata={"format": "pt"})


def read(directory: Path) -> Tensors:
    return load_init(str(directory), CONFIG, TargetFiles(directory))[1]


def export(directory: Path, state: Tensors, target: TargetFiles) -> dict[str, str]:
    """Export a module, and return the file of each tensor."""
    export_head(directory, "vllm", CONFIG, state, target.directory)
    files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return files


@pytest.mark.parametrize("family", tiers(MODULES, core=["glm4_moe"]))
def test_a_published_module_is_read_and_written_back_as_it_was(tmp_path: Path, family: str) -> None:
    """GLM-4.5 has biases in its attention, and a checkpoint of it in bf16 has the bias of its router in fp32."""
    assert MODULES.keys() == NATIVE_MTP.keys()
    target, is_glm = tmp_path / "target", family == "glm4_moe"
    _, state = write_checkpoint(target, family, **({"attention_bias": True} if is_glm else {}))
    assert any(name.endswith("_proj.bias") for name in state) == is_glm
    if is_glm:
        change(target, lambda tensors: {name: as_published(name, tensor) for name, tensor in tensors.items()})
        state = {name: as_published(name, tensor) for name, tensor in state.items()}
    before = load_file(target / "model.safetensors")
    assert_equal(read(target), state)
    if is_glm:  # a trained module keeps the dtypes of its checkpoint
        files_of, config = TargetFiles(target), replace(CONFIG, init_from=str(target))
        found = trained_or_initial_head(tmp_path, config, files_of, None, CPU)
        save_head(tmp_path / "best", found.head.state_dict(), CONFIG, {TARGET_WEIGHTS: files_of.weights_sha256})
        assert_equal(load_head(f"{tmp_path}/best", CONFIG, files_of, None, CPU)[1].state_dict(), state)
    files = export(tmp_path / "export", {name: tensor + 1 for name, tensor in state.items()}, TargetFiles(target))
    assert files.keys() == before.keys()
    for name, tensor in before.items():
        is_of_module = name.startswith(OF_MODULES) and not name.endswith(COPIES)
        assert files[name] == ("mtp.safetensors" if is_of_module else "target.safetensors")
        written = load_file(tmp_path / "export" / files[name])[name]
        assert written.dtype is tensor.dtype and torch.equal(written, tensor + 1 if is_of_module else tensor)
    assert json.loads((tmp_path / "export/config.json").read_text()) == json.loads((target / "config.json").read_text())


def as_published(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()


@pytest.mark.slow
def test_targets_may_have_no_module_yet_other_file_names_and_a_nested_config(tmp_path: Path) -> None:
    directory, written = tmp_path / "target", tmp_path / "export"
    _, state = write_checkpoint(directory, "glm4_moe")
    change(directory, without(BEHIND))
    kept = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "mtp.safetensors")  # the name of the head's file
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "mtp.safetensors")}
    (directory / INDEX).write_text(json.dumps(index))
    stored = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (directory / "config.json").write_text(json.dumps(stored))
    files = export(written, state, TargetFiles(directory))
    assert json.loads((written / "config.json").read_text()) == stored | {"num_nextn_predict_layers": 1}
    assert files["lm_head.weight"] == "target-mtp.safetensors"
    assert all(torch.equal(load_file(written / files[name])[name], x) for name, x in kept.items())
    assert_equal(read(written), state)

    write_image_model(tmp_path / "image", *IMAGE_MODELS["qwen3_5"])
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


E8, I4 = torch.zeros(64, 128, dtype=torch.float8_e4m3fn), torch.ones(32, 8, dtype=torch.int32)
REFUSED: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (without(BEHIND), rf"{BEHIND}eh_proj\.weight of the target's MTP module must be .*, but is absent; choose"),
    (lambda x: {**x, f"{BEHIND}fc.bias": torch.ones(64)}, r"fc\.bias of .* must be absent, but is of shape"),
    (lambda x: {**x, f"{BEHIND}eh_proj.weight": E8}, r"eh_proj\.weight must hold floating-point .*float8_e4"),
    (lambda x: {**without(EXPERT)(x), f"{EXPERT}_packed": I4}, r"weight_packed must hold floating-point .*int32; choo"),
]


def test_a_module_that_is_not_whole_is_refused_by_the_names_of_its_tensors(tmp_path: Path, tiny_target: Path) -> None:
    write_checkpoint(tmp_path, "glm4_moe")
    stored, lm_head = load_file(tmp_path / "model.safetensors"), f"{BEHIND}shared_head.head.weight"
    for changed, message in REFUSED:
        save_file(changed(stored), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="set head=native_mtp"):
        load_init(str(tmp_path), MtpHead.Config(), TargetFiles(tmp_path))
    save_file(stored | {lm_head: 2 * stored[lm_head]}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"shared_head\.head\.weight should equal the target's, which is used"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"must be of a family whose MTP modules are known \(deepseek_v3, .*but is a"):
        read(tiny_target)
