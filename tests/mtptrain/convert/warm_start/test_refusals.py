"""Tests that a checkpoint of another head than the run's is refused, with the matching settings if there are any."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HTTPError
from safetensors.torch import save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.warm_start import load_init
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.convert.warm_start.written_heads import (
    EAGLE,
    EAGLE3,
    MTP,
    VARIANTS,
    rewrite,
    unchanged,
    without,
    write,
)


def test_another_head_is_refused_with_the_whole_command_line_that_fits(tmp_path: Path, tiny_target: Path) -> None:
    write(tmp_path / "head", "vllm", VARIANTS["eagle3.1"], tiny_target)
    with pytest.raises(
        ValueError,
        match=r"must hold the head mtp, as in the recipe, but holds the head eagle3; set head=eagle3 "
        r"head\.num_attention_heads=1 "
        r"head\.num_key_value_heads=1 head\.intermediate_size=96 head\.head_dim=64 head\.fc_norm=true "
        r"head\.norm_output=true "
        r"head\.capture_layers=\[0,1,2\], or choose another head",
    ):
        load_init(str(tmp_path / "head"), MTP, TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=40),
            r"differ in head\.draft_vocab_size \(48 there, 40 here\); set head\.draft_vocab_size=48, or choose",
        ),
        (
            Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48, norm_output=True, intermediate_size=32),
            r"head\.intermediate_size \(96 there, 32 here\), head\.norm_output \(False there, True here\); "
            r"set head\.intermediate_size=96 head\.norm_output=false, or choose another head",
        ),
    ],
    ids=["size", "several"],
)
def test_other_settings_are_refused_with_those_to_set(
    tmp_path: Path, tiny_target: Path, config: HeadConfig, message: str
) -> None:
    write(tmp_path / "head", "vllm", EAGLE3, tiny_target)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            without("norm.weight"),
            {},
            r"norm\.weight of .* must be of shape \(64,\) for head eagle3 .*, but is absent; choose another",
        ),
        (
            lambda t: {**t, "mask_hidden": torch.ones(1, 3)},
            {"mask_token_id": 0},
            r"must hold the head eagle3, .*, but holds the head peagle; set head=peagle .* head\.mask_token_id=0, or",
        ),
        (
            lambda t: {**t, "fc.weight": torch.ones(64, 64)},
            {},
            r"fc\.weight of .* must be of shape \(64, 128\) .*, but is of shape",
        ),
        (
            lambda t: {**t, "d2t": t["d2t"] + 300},
            {},
            r"d2t of .* within the target's 0\.\.259, but lead to 48 tokens within 301\.\.395",
        ),
        (
            lambda t: {**t, "d2t": -torch.arange(48)},
            {},
            r"different tokens within the target's 0\.\.259, but lead to 1 tokens within 0\.\.0",
        ),
        (
            lambda t: {**t, "fc.bias": torch.ones(64)},
            {},
            r"fc\.bias of .* must be zero, because the head has no such bias",
        ),
        (
            unchanged,
            {"mask_token_id": 3},
            r"config\.json: must have no mask_token_id, because it has no mask_hidden, but has \[3\]",
        ),
        (
            unchanged,
            {"attention_bias": True},
            r"config\.json: attention_bias must be false, because the files have no q_proj\.bias, but is true",
        ),
        (
            unchanged,
            {"bias": True},
            r"config\.json: bias must be false, because the files have no fc\.bias, but is true",
        ),
        (unchanged, {"hidden_act": "gelu"}, r'config\.json: hidden_act must be "silu", as in our heads, but is "gelu"'),
        (unchanged, {"logit_scale": 0.5}, r"config\.json: logit_scale must be 1\.0, as in our heads, but is 0\.5"),
        (
            unchanged,
            {"hidden_size": 128},
            r"config\.json: hidden_size must be 64 for this target, but is 128; choose another head",
        ),
        (
            unchanged,
            {"eagle_config": {"use_aux_hidden_state": False}},
            r"eagle_config\.use_aux_hidden_state must be true, as in our heads, but is false",
        ),
        (
            unchanged,
            {"architectures": ["EagleMiniCPMForCausalLM"]},
            r"a published head of class EagleDeepSeekMTPModel or MiMoForCausalLM \(head mtp\), .*, but .* holds a "
            r"EagleMiniCPMForCausalLM; choose another",
        ),
    ],
    ids=[
        "missing",
        "unknown",
        "shape",
        "range",
        "twice",
        "bias",
        "mask tokens",
        "biases",
        "fusion bias",
        "activation",
        "scale",
        "hidden",
        "aux",
        "architecture",
    ],
)
def test_what_is_not_the_head_is_refused(
    tmp_path: Path, tiny_target: Path, change: Callable[[Tensors], Tensors], settings: dict[str, object], message: str
) -> None:
    write(tmp_path / "head", "vllm", EAGLE3, tiny_target)
    rewrite(tmp_path / "head", change, **settings)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", "layers.0.self_attn.qkv_proj.weight"), ("sglang", "model.mtp_layers.0.input_proj.weight")],
)
def test_a_missing_tensor_that_is_taken_apart_is_refused(
    tmp_path: Path, tiny_target: Path, engine: str, name: str
) -> None:
    write(tmp_path / "head", engine, MTP, tiny_target)
    rewrite(tmp_path / "head", without(name))
    with pytest.raises(ValueError, match=r"must hold every tensor of its format, but does not \('.*'\); download it"):
        load_init(str(tmp_path / "head"), MTP, TargetFiles(tiny_target))


def test_biases_that_an_engine_wants_are_refused_unless_they_are_zero(tmp_path: Path, tiny_target: Path) -> None:
    write(tmp_path / "head", "sglang", EAGLE, tiny_target)
    rewrite(tmp_path / "head", lambda tensors: {**tensors, "fc.bias": tensors["fc.bias"] + 1})
    with pytest.raises(ValueError, match=r"fc\.bias of .* must be zero, because the head has no such bias"):
        load_init(str(tmp_path / "head"), EAGLE, TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            r"weights must be safetensors files, but .* has none; convert pytorch_model.bin to safetensors",
        ),
        ({"config.json": "{}"}, r"has none; choose a head that has them, or convert its \.bin or \.pt file"),
        (
            {"model.safetensors": None},
            r"must hold head\.json or config\.json, but .* has neither; choose another directory",
        ),
        (
            {"model.safetensors": None, "config.json": '{"architectures": ["LlamaForCausalLM"]}'},
            r"holds a LlamaForCausalLM; set head=draft_model to draft with this language model, or choose",
        ),
        (
            {"model.safetensors": None, "config.json": '{"architectures": ["EagleLlamaForCausalLM"]}'},
            r"config\.json: must have hidden_size, but does not; download the head again",
        ),
    ],
    ids=["pickle", "no weights", "no config", "no head", "empty config"],
)
def test_a_directory_without_a_readable_head_is_refused(
    tmp_path: Path, tiny_target: Path, files: dict[str, str | None], message: str
) -> None:
    for name, text in files.items():
        if text is None:
            save_file({"x": torch.ones(1)}, tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path), MTP, TargetFiles(tiny_target))


@pytest.mark.parametrize("refused", [{"quant_algo": "FP8"}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, 8])
def test_a_quantisation_beside_the_config_is_refused(tmp_path: Path, tiny_target: Path, refused: object) -> None:
    write(tmp_path, "vllm", EAGLE3, tiny_target)
    none = {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": []}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": none}))
    load_init(str(tmp_path), EAGLE3, TargetFiles(tiny_target))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": refused}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: must name no quantisation, .* but has .*8"):
        load_init(str(tmp_path), EAGLE3, TargetFiles(tiny_target))


def test_a_path_that_is_neither_directory_nor_hub_name_is_refused(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"head\.init_from: must be a local directory or a hub name, but '/no/head' is not"
    ):
        load_init("/no/head", MTP, TargetFiles(tiny_target))

    def fail(*args: object, **kwargs: object) -> str:
        raise errors[-1]

    monkeypatch.setattr("mtptrain.convert.published.heads.snapshot_download", fail)
    errors: list[Exception] = []
    gated = OSError("401 Client Error.\n\nCannot access gated repo for url https://hub/no/head.")
    for error, reason in (
        (TimeoutError(), "TimeoutError; correct the path"),
        (gated, r"401 .* gated repo for url https://hub/no/head\.; correct the path, log in with `hf auth login` if"),
        (HTTPError("403 Forbidden"), "403 Forbidden; correct the path"),
    ):
        errors.append(error)
        with pytest.raises(UserError, match=f"'no/head' is not .* cannot be downloaded: {reason}"):
            load_init("no/head", MTP, TargetFiles(tiny_target))


def test_a_block_drafter_of_another_block_size_or_without_its_settings_is_refused(tmp_path: Path) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    config = DflashHead.Config(capture_layers=[1, 3], mask_token_id=7, ttt_steps=5)
    write(tmp_path / "head", "vllm", config, target_dir)
    other = replace(config, ttt_steps=3)
    with pytest.raises(ValueError, match=r"differ in head\.ttt_steps \(5 there, 3 here\); set head\.ttt_steps=5"):
        load_init(str(tmp_path / "head"), other, TargetFiles(target_dir))
    rewrite(tmp_path / "head", unchanged, block_size=None)
    with pytest.raises(ValueError, match=r"config\.json: must have block_size, but does not; download"):
        load_init(str(tmp_path / "head"), config, TargetFiles(target_dir))
