"""Tests that targets that cannot be read, trained on or placed are refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts, load_last_layer
from mtptrain.target.hub import config_dir, resolve_target
from mtptrain.target.loading import check_placement, load_target
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from tests.conftest import FAMILIES, make_target
from tests.mtptrain.target.inputs import CPU, write_config


def test_a_target_whose_norm_accelerate_leaves_off_the_devices_is_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    cpu_offload(model.model.norm, CPU)
    with pytest.raises(
        ValueError, match=r"target\.path: .*lm_head of the target must fit the GPUs of one machine, but accelerate has"
    ):
        Target(model)


def test_a_family_without_a_language_model_is_refused_by_name(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"target\.path: transformers must have a language model .* none for 't5' in "):
        read_target_config(tmp_path)


def test_a_checkpoint_without_its_final_norm_is_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"the checkpoint must hold model\.norm\.weight, but does not; download it again"
    with pytest.raises(ValueError, match=message):
        load_frozen_parts(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, torch.float32, CPU)


QUANTISED_FILES = {
    "fp8 with a scale": {
        "lm_head.weight": torch.zeros(8, 4).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.ones(8, 1),
    },
    "a scale in bf16": {
        "lm_head.weight": torch.zeros(8, 4),
        "lm_head.weight_scale": torch.ones(8, 1, dtype=torch.bfloat16),
    },
    "GPTQ": {"lm_head.qweight": torch.zeros(1, 4, dtype=torch.int32), "lm_head.scales": torch.ones(1, 4)},
    "int8 embeddings": {"model.embed_tokens.weight": torch.zeros(8, 4, dtype=torch.int8)},
    "last layer in fp8": {"model.layers.1.mlp.down_proj.weight": torch.zeros(8, 4).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("kind", QUANTISED_FILES)
def test_quantised_tensors_that_training_reads_are_refused(tmp_path: Path, kind: str) -> None:
    directory, added = make_target(tmp_path, "llama", tie_word_embeddings=False), QUANTISED_FILES[kind]
    tensors = load_file(directory / "model.safetensors")
    if "lm_head.qweight" in added:
        del tensors["lm_head.weight"]
    save_file(tensors | added, directory / "model.safetensors")
    module = next(iter(added)).rpartition(".")[0]
    read = load_last_layer if "last layer" in kind else load_frozen_parts
    message = (
        rf"target\.path: {module} must be unquantised, .*model\.safetensors has {module}\.\w+ in \w+; choose the unq"
    )
    with pytest.raises(ValueError, match=message):
        read(directory)


def test_a_target_with_quantised_layers_and_a_plain_lm_head_is_accepted(tmp_path: Path) -> None:
    directory = make_target(tmp_path, "llama", tie_word_embeddings=False, quantization_config={"quant_method": "fp8"})
    save_file(
        load_file(directory / "model.safetensors") | QUANTISED_FILES["last layer in fp8"],
        directory / "model.safetensors",
    )
    assert load_frozen_parts(directory).lm_head.dtype == torch.float32


def test_a_checkpoint_with_other_names_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"must hold lm_head\.weight, model\.embed_tokens\.weight, .* and \d+ more, but does not"
    ):
        load_target(tmp_path, torch.float32, CPU)


def test_a_directory_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.path: must be a model directory, but .* has no config\.json"):
        resolve_target(str(tmp_path))
    make_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights must be safetensors files, but .* does not exist"):
        load_frozen_parts(tmp_path)


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError,
        match=r"target\.path: must be a local directory, a GGUF file, a hub name or `demo`, but 'no/such' is neither",
    ):
        resolve_target("no/such")


HUBS_ANSWER = """\
401 Client Error. (Request ID: Root=1-6a0b-2f;1a2b-3c4d)

Repository Not Found for url: https://huggingface.co/api/models/no/such/revision/main.
Please make sure you specified the correct `repo_id` and `repo_type`.
If you are trying to access a private or gated repo, make sure you are authenticated."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError(HUBS_ANSWER),
            r"401 Client Error\. .* Repository Not Found for url: \S+ .*, make sure you are auth\S+",
        ),
        (HTTPError("403 Forbidden"), "403 Forbidden"),
        (HTTPError(""), "HTTPError"),
        (OSError(28, "No space left on device"), r"\[Errno 28\] No space left on device"),
    ],
    ids=["refused by the hub", "refused by a proxy", "without a message", "a full disk"],
)
@pytest.mark.parametrize("find", [resolve_target, config_dir])
def test_a_target_that_cannot_be_downloaded_is_refused_with_the_whole_reason(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[str], Path], error: Exception, reason: str
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(f"mtptrain.target.hub.{name}", fail)
    message = rf"'no/such' is neither .* and it could not be downloaded: {reason}; correct the path, log in with `hf au"
    with pytest.raises(UserError, match=message):
        find("no/such")


def test_a_download_leaves_out_copies_of_the_weights_in_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters the names as `snapshot_download` does."""
    wanted = ["config.json", "chat_template.jinja", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    others = ["consolidated.safetensors", "consolidated.safetensors.index.json", "original/model.safetensors", "a.bin"]
    downloaded: list[str] = []

    def download(path: str, revision: str | None, **patterns: list[str]) -> str:
        downloaded.extend(filter_repo_objects([*wanted, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("mtptrain.target.hub.snapshot_download", download)
    assert resolve_target("some/model") == tmp_path
    assert downloaded == wanted


def test_a_target_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"a token must not attend to later tokens, but use_bidirectional_attention is set in .*config\.json",
    ):
        write_config(tmp_path, model_type="gemma3_text", use_bidirectional_attention=True)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"sliding_window": 16}),
        ("deepseek_v2", {"sliding_window": 16}),
        (
            "llama",
            {"sliding_window": 16, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("qwen3_moe", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_windows_that_transformers_ignores_are_refused(
    tmp_path: Path, model_type: str, settings: dict[str, object]
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"transformers must implement the sliding windows of '{model_type}', but .* remove "
        r"sliding_window",
    ):
        write_config(tmp_path, model_type=model_type, **settings)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="llama", max_position_embeddings=512, sliding_window=512)


def test_a_target_that_several_ranks_cannot_place_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates eight GPUs, of which only the number and the memory size are read."""
    directory = make_target(tmp_path)
    size = (directory / "model.safetensors").stat().st_size  # in fp32
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    message = (
        r"must fit one device if several ranks share a machine, but does not; start one process, "
        r".*train.validation_prompts=0"
    )
    with pytest.raises(ValueError, match=message):
        check_placement(directory, torch.float32, torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_placement(directory, torch.float32, torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_placement(directory, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2 * size))
    check_placement(directory, torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rotary_embeddings_of_a_family_that_rotates_whole_heads_are_refused(
    tmp_path: Path, family: str, place: str
) -> None:
    """Some of these models would rotate whole heads, where engines rotate a part of each; the others cannot run."""
    model_type, settings = FAMILIES[family]
    make_target(tmp_path, model_type, settings)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    (config if place == "top" else rope)["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"partial_rotary_factor must be 1, because|forward of transformers must run"):
        load_target(tmp_path, torch.float32, CPU)
    (config if place == "top" else rope)["partial_rotary_factor"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_target(tmp_path, torch.float32, CPU)
