"""Tests that each format keeps the whole head, and that its config has the target's settings that engines read."""

import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from mtptrain.engines.table import FORMATS, format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.heads import HEADS
from mtptrain.heads.layer_head import LayerHead
from tests.mtptrain.engines.conftest import head_config, random_head, target_config

EAGLE3_VARIANTS: list[dict[str, object]] = [
    {"draft_vocab_size": 96},
    {"draft_vocab_size": 260},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "head_dim": 128, "capture_layers": [1, 3]},
]
OF_ONE_FAMILY = "native_mtp"
"""The head whose format depends on the target's family; see tests/mtptrain/init_from/test_native_mtp.py."""
WITH_CONFIG = [(engine, name) for engine, name in FORMATS if engine != "llama_cpp" and name != OF_ONE_FAMILY]
"""Formats with a `config.json`. See test_llama_cpp.py for the others."""
CASES = [(engine, name, {}) for engine, name in WITH_CONFIG] + [
    (engine, name, settings)
    for engine, name in WITH_CONFIG
    if name in ("eagle3", "peagle")
    for settings in EAGLE3_VARIANTS
    if engine != "openvino" or "draft_vocab_size" in settings  # it has none of the other flags
]
CASES += [("vllm", "dflash", {"draft_vocab_size": 96, "num_layers": 3, "head_dim": 128})]
every_case = pytest.mark.parametrize(("engine", "name", "settings"), CASES)
LAYER_FORMATS = [(engine, name) for engine, name in WITH_CONFIG if issubclass(HEADS[name], LayerHead)]
"""Formats of heads that an engine runs as a Llama."""


@every_case
def test_a_heads_state_comes_back_exactly_from_what_is_written(
    tmp_path: Path, target: LlamaConfig, engine: str, name: str, settings: dict[str, object]
) -> None:
    config = head_config(name, **settings)
    form, state = format_for(engine, config, target), random_head(config, target).state_dict()
    tensors = form.tensors(state)
    restored = form.state(tensors)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], state[key]) for key in state)
    assert form.tensors(restored).keys() == tensors.keys(), "neither direction may change its argument"
    write_head(tmp_path / "out", form, state)
    check_tensors(tmp_path / "out", form)


@pytest.mark.parametrize(("engine", "name", "settings"), [case for case in CASES if case[:2] in LAYER_FORMATS])
def test_the_written_config_is_one_that_transformers_reads(
    tmp_path: Path, target: LlamaConfig, engine: str, name: str, settings: dict[str, object]
) -> None:
    """Engines read the config with transformers first."""
    form = format_for(engine, head_config(name, **settings), target)
    write_head(tmp_path / "out", form, random_head(form.head, target).to(torch.bfloat16).state_dict())
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == [form.architecture]
    assert (config.vocab_size, config.hidden_size, config.max_position_embeddings) == (260, 64, 512)
    assert config.head_dim == settings.get("head_dim", 64)


@pytest.mark.parametrize(("engine", "name"), LAYER_FORMATS)
def test_the_targets_scaled_rope_goes_along(tmp_path: Path, engine: str, name: str) -> None:
    """Tests that a scaled RoPE is copied from the target."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    target = target_config(rope_parameters=rope)
    form = format_for(engine, head_config(name), target)
    write_head(tmp_path / "out", form, random_head(form.head, target).state_dict())
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rope


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gemmas_head_gets_the_rope_of_the_layers_with_full_attention(engine: str) -> None:
    target = AutoConfig.for_model(
        "gemma3_text", hidden_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=96
    )
    rope = format_for(engine, head_config("mtp"), target).config_json("bfloat16")["rope_parameters"]
    assert (
        rope["rope_type"] == "default" and rope["rope_theta"] == target.rope_parameters["full_attention"]["rope_theta"]
    )


def test_draft_ids_are_written_as_int64_offsets_and_a_bool_mask(target: LlamaConfig) -> None:
    config = head_config("eagle3", draft_vocab_size=4)
    head = random_head(config, target)
    assert head.d2t is not None
    head.d2t.copy_(torch.tensor([0, 4, 97, 256]))  # ids 0, 5, 99, 259
    for engine in ("vllm", "sglang"):
        tensors = format_for(engine, config, target).tensors(head.state_dict())
        assert tensors["d2t"].dtype is torch.int64 and tensors["d2t"].tolist() == [0, 4, 97, 256]
        assert tensors["t2d"].dtype is torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == [0, 5, 99, 259]
        assert list(tensors["t2d"].shape) == [260]


def test_a_head_that_an_engine_has_no_class_for_is_refused_with_the_engines_that_have_one(target: LlamaConfig) -> None:
    message = (
        r"export\.engine: must be vllm or sglang or llama_cpp or tensorrt_llm or openvino for head eagle3, but is "
        r"transformers, for which mtptrain does not write it; set export\.engine=vllm"
    )
    with pytest.raises(ValueError, match=message):
        format_for("transformers", head_config("eagle3"), target)


@pytest.mark.parametrize(
    ("engine", "name"),
    [("llama_cpp", "eagle3"), *((engine, name) for engine, name in WITH_CONFIG if engine != "transformers")],
)
def test_the_launch_command_quotes_paths_for_the_shell(target: LlamaConfig, engine: str, name: str) -> None:
    command = format_for(engine, head_config(name), target).launch("/Ann's target", Path("/Ann's heads/DIR"), 3)
    words = shlex.split(command)
    assert "/Ann's target" in words and any("/Ann's heads/DIR" in word for word in words)
