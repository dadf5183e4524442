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
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, load_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NATIVE_MTP, NativeMtpHead
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from tests.families import IMAGE_MODELS, write_image_model
from tests.mtptrain.convert.warm_start.written_heads import assert_equal, without
from tests.native_modules import MODULES, NUM_LAYERS, published_names, write_checkpoint

CONFIG = NativeMtpHead.Config()
EXPERT = f"model.layers.{NUM_LAYERS}.mlp.experts.3.up_proj.weight"


def test_every_known_family_is_tested() -> None:
    assert MODULES.keys() == NATIVE_MTP.keys()


@pytest.mark.parametrize("family", MODULES)
def test_a_published_module_is_read_and_written_back_as_it_was(tmp_path: Path, family: str) -> None:
    config, state = write_checkpoint(tmp_path / "target", family)
    before, stored = load_file(tmp_path / "target/model.safetensors"), tmp_path / "target/config.json"
    found = load_init(str(tmp_path / "target"), CONFIG, TargetFiles(tmp_path / "target"))
    assert_equal(found, state)

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
    path, bias = tmp_path / "target/model.safetensors", f"model.layers.{NUM_LAYERS}.mlp.gate.e_score_correction_bias"
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


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_text"])
def test_the_biases_of_a_modules_attention_are_its_own(tmp_path: Path, family: str) -> None:
    """GLM-4.5 has them."""
    config, state = write_checkpoint(tmp_path, family, attention_bias=True)
    assert any(name.endswith("_proj.bias") for name in state)
    found = load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))
    assert_equal(found, state)
    assert format_for("vllm", CONFIG, config).tensors(state).keys() > published_names(family)


def test_a_weight_file_of_the_target_that_is_named_like_the_heads_gets_another_name(tmp_path: Path) -> None:
    config, state = write_checkpoint(tmp_path / "target", "glm4_moe")
    stored = load_file(tmp_path / "target/model.safetensors")
    (tmp_path / "target/model.safetensors").unlink()
    save_file(stored, tmp_path / "target/mtp.safetensors", metadata={"format": "pt"})
    files = {"metadata": {}, "weight_map": dict.fromkeys(stored, "mtp.safetensors")}
    (tmp_path / "target" / INDEX).write_text(json.dumps(files))
    form = format_for("vllm", CONFIG, config)
    write_head(tmp_path / "export", form, state)
    form.add_target(tmp_path / "export", tmp_path / "target")
    check_tensors(tmp_path / "export", form)
    written = json.loads((tmp_path / "export" / INDEX).read_text())["weight_map"]
    assert written["lm_head.weight"] == "target-mtp.safetensors" and written.keys() == stored.keys()


def test_a_language_model_inside_an_image_model_declares_its_module_itself(tmp_path: Path) -> None:
    family, settings = IMAGE_MODELS["qwen3_5"]
    write_image_model(tmp_path / "target", family, settings)
    path = tmp_path / "target/config.json"
    stored = json.loads(path.read_text())
    stored["text_config"]["mtp_num_hidden_layers"] = 0
    path.write_text(json.dumps(stored))
    target = TargetFiles(tmp_path / "target")
    form, state = format_for("vllm", CONFIG, target.config), build_head(CONFIG, target.config).state_dict()
    write_head(tmp_path / "export", form, state)
    form.add_target(tmp_path / "export", target.directory)
    stored["text_config"]["mtp_num_hidden_layers"] = 1
    assert json.loads((tmp_path / "export/config.json").read_text()) == stored
    found = load_init(str(tmp_path / "export"), CONFIG, TargetFiles(tmp_path / "export"))
    assert_equal(found, state)
    assert form.architecture == "Qwen3_5ForCausalLM"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", "glm4_moe")
    write_checkpoint(tmp_path / "other", "qwen3_next")
    (tmp_path / "empty").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "empty/model.safetensors")
    target = TargetFiles(tmp_path / "target")
    with pytest.raises(ValueError, match=r"the target's model, with model_type glm4_moe, but .* qwen3_next;"):
        load_init(str(tmp_path / "other"), CONFIG, target)
    with pytest.raises(ValueError, match=r"must be a checkpoint with its config\.json, but .*empty has none; choose"):
        load_init(str(tmp_path / "empty"), CONFIG, target)


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_a_checkpoint_without_a_module_gets_one_and_is_still_the_target(tmp_path: Path, family: str) -> None:
    config, state = write_checkpoint(tmp_path / "target", family)
    tensors = load_file(tmp_path / "target/model.safetensors")
    module = ("mtp.", f"model.layers.{NUM_LAYERS}.")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
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
    assert_equal(found, state)


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
    assert_equal(found, state)
    both = tensors | joined | {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(32, 64)}
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj\.weight of .* must be absent beside the joined experts for this"):
        load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_next",
            without("mtp."),
            r"must hold every tensor of its MTP module, of which its config\.json declares 1 "
            r"\(num_nextn_predict_layers\), but lacks mtp\.fc\.weight, "
            r"mtp\.layers\.0\.input_layernorm\.weight, .* and \d+ more; download the files that hold them",
        ),
        (
            "glm4_moe",
            without(f"model.layers.{NUM_LAYERS}.mlp.experts.3.up_proj"),
            rf"but lacks model\.layers\.{NUM_LAYERS}\.mlp\.experts\.3\.up_proj\.weight; download",
        ),
        ("ernie4_5_moe", without("model.mtp_linear_proj"), r"but lacks model\.mtp_linear_proj\.0\.weight; download"),
        (
            "deepseek_v3",
            lambda tensors: {
                **tensors,
                f"model.layers.{NUM_LAYERS}.eh_proj.weight": torch.zeros(64, 128, dtype=torch.float8_e4m3fn),
            },
            r"must have floating-point numbers of 16 bits or more, .*eh_proj\.weight has torch\.float8_e4m3fn; choose",
        ),
        (
            "qwen3_5_text",
            lambda tensors: {**tensors, "mtp.fc.bias": torch.ones(64)},
            r"eh_proj\.bias of .* must be absent for head native_mtp and this target, but is of shape \(64,\)",
        ),
        (
            "qwen3_5_text",
            lambda tensors: {**tensors, "mtp.fc.weight": torch.ones(64, 64)},
            r"eh_proj\.weight of .* must be of shape \(64, 128\) for head native_mtp",
        ),
        (
            "glm4_moe",
            lambda tensors: {**tensors, EXPERT: torch.ones(32, 64, dtype=torch.int32)},
            r"must have floating-point numbers of 16 bits or more, .*up_proj\.weight has torch\.int32; choose",
        ),
        (
            "glm4_moe",
            lambda tensors: {**without(EXPERT)(tensors), f"{EXPERT}_packed": torch.ones(32, 8, dtype=torch.int32)},
            r"must have floating-point numbers of 16 bits or more, .*up_proj\.weight_packed has torch\.int32; choose",
        ),
        (
            "glm4_moe",
            lambda tensors: {**tensors, EXPERT: torch.ones(16, 64)},
            r"experts\.3\.up_proj\.weight of .* must be of shape \(32, 64\) for this target, but is of shape \(16,",
        ),
    ],
    ids=["all", "an expert", "a projection", "fp8", "a bias", "a shape", "int32", "packed", "the shape of an expert"],
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
    tensors[f"model.layers.{NUM_LAYERS}.shared_head.head.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"shared_head\.head\.weight should equal the target's, which is used"):
        load_init(str(tmp_path), CONFIG, TargetFiles(tmp_path))
