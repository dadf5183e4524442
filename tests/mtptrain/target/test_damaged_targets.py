"""Tests that a target with damaged or contradictory files is refused, with its path or the file's, before loading."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.target.checkpoint_check import check_weights
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.hub import load_tokenizer, weight_files, weights_fingerprint
from mtptrain.target.loading import load_target
from mtptrain.utils.files import save_tensors

CPU = torch.device("cpu")
GARBAGE, NESTED = bytes(range(128, 256)), b"[" * 100_000 + b"]" * 100_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def target(tmp_path: Path, tiny_target: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "target")


def change_json(path: Path, **settings: object) -> None:
    content = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GARBAGE, r"must be UTF-8, but is not \('utf-8' codec"),
        (NESTED, "must be JSON, but is nested too deep"),
        (b"[]", "must hold a JSON object, but holds a list; download it again"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_cannot_be_read_is_named(target: Path, name: str, content: bytes, message: str) -> None:
    (target / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{name}: {message}"):
        read_target_config(target)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_type", ..., "model_type must name a family of models, but is None; download it again"),
        ("model_type", 3, "model_type must name a family of models, but is 3; download it again"),
        ("model_type", "nonsense", "must be readable by transformers, which reports .*nonsense"),
        ("num_hidden_layers", -1, "num_hidden_layers must be at least 1, but is -1"),
        ("head_dim", -2, "head_dim must be at least 1, but is -2"),
        ("max_position_embeddings", -1, "max_position_embeddings must be at least 1, but is -1"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": -1.0},
            "rope_theta must be a number above 0, but is",
        ),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}, "rope_theta must be .*, but is nan"),
        ("num_nextn_predict_layers", "x", "num_nextn_predict_layers must be a whole number, but is 'x'"),
        ("num_key_value_heads", 0, "num_key_value_heads must be at least 1, but is 0"),
        ("num_key_value_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads, but they are 1 and"),
        ("vocab_size", "many", "must be readable by transformers, which reports .*'vocab_size' expected int, got str"),
        ("eos_token_id", 500, "eos_token_id must be token ids below vocab_size=260, but is 500; download it again"),
        ("num_attention_heads", 7, "must be readable by transformers, which reports .*not a multiple"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_name(target: Path, setting: str, value: object, message: str) -> None:
    change_json(target / "config.json", **{setting: value})
    (target / "generation_config.json").unlink()  # its eos_token_id would take precedence
    with pytest.raises(ValueError, match=rf"/config\.json: {message}"):
        read_target_config(target)


def test_an_adapter_beside_the_weights_is_refused(target: Path) -> None:
    (target / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"/adapter_config\.json: must not exist, .*; merge the adapter"):
        read_target_config(target)


@pytest.mark.parametrize("value", [{"a": 1}, [None], "abc", 99999999, 1.5, [3, -1]])
def test_a_generation_config_with_other_than_tokens_is_named(target: Path, value: object) -> None:
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"/generation_config\.json: eos_token_id must be token ids below"):
        read_target_config(target)


@pytest.mark.parametrize("load", [load_frozen_parts, lambda target: load_target(target, torch.float32, CPU)])
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("vocab_size", 1000, r"model\.safetensors: model\.embed_tokens\.weight must have the shape \(1000, 64\) .*260"),
        ("vocab_size", 258, r"model\.safetensors: model\.embed_tokens\.weight must have the shape \(258, 64\) .*260"),
        ("intermediate_size", 10, r"model\.safetensors: model\.layers\.0\.mlp\.\w+\.weight must have the shape"),
        ("num_hidden_layers", 1, "target: the weights must have num_hidden_layers=1 layers, .*, but have 2"),
        ("num_hidden_layers", 10**9, r"config\.json: num_hidden_layers must be at most 10000, but is 1000000000"),
        ("pad_token_id", 1000000, r"config\.json: must describe a model .*AssertionError"),
        ("attn_implementation", "flash_attention_2", r"config\.json: must describe a model .*FlashAttention2"),
        ("hidden_act", "nonsense", r"config\.json: must describe a model that transformers can build, .*nonsense"),
    ],
)
def test_weights_that_contradict_the_config_are_refused(
    target: Path, load: Callable[[Path], object], setting: str, value: object, message: str
) -> None:
    change_json(target / "config.json", **{setting: value})
    with pytest.raises(ValueError, match=message):
        load(target)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_integer_weights_are_refused_unless_the_config_explains_them(target: Path, dtype: torch.dtype) -> None:
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_tensors(target / "model.safetensors", {**weights, name: weights[name].to(dtype)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name} must have one of the dtypes F64, .* but has"):
        check_weights(target)
    (target / "hf_quant_config.json").write_text("{}")
    check_weights(target)


@pytest.mark.parametrize(
    "read", [load_frozen_parts, weights_fingerprint, lambda target: load_target(target, torch.float32, CPU)]
)
def test_incomplete_weights_are_named_wherever_they_are_read(target: Path, read: Callable[[Path], object]) -> None:
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: must be a complete safetensors file, but cannot be"):
        read(target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GARBAGE, r"must be UTF-8, but is not \('utf-8' codec"),
        (b"{}", "must name the file of each tensor in weight_map, but does not"),
        (b'{"weight_map": {}}', "must name the file of each tensor in weight_map, but does not"),
        (b'{"weight_map": ["a"]}', "must name the file of each tensor in weight_map, but does not"),
        (
            b'{"weight_map": {"a": "/a.safetensors"}}',
            "must name files in its own directory, but names '/a",
        ),
        (b'{"weight_map": {"a": "../a.safetensors"}}', r"must name files in its own directory, but names '\.\./a"),
    ],
)
def test_an_index_that_cannot_be_followed_is_named(target: Path, content: bytes, message: str) -> None:
    (target / INDEX).write_bytes(content)
    for read in (check_weights, weights_fingerprint):
        with pytest.raises(ValueError, match=rf"/{INDEX}: {message}"):
            read(target)


def test_an_index_beside_other_weights_is_refused(target: Path) -> None:
    (target / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ValueError, match=rf"target: must have either model\.safetensors or {INDEX}, but has both"):
        weights_fingerprint(target)


def test_only_the_files_of_the_checkpoint_are_its_weights(target: Path) -> None:
    """`consolidated.safetensors` repeats the weights of a checkpoint in another layout, and transformers ignores it."""
    single, shard = target / "model.safetensors", target / "model-00001-of-00001.safetensors"
    shutil.copy(single, target / "consolidated.safetensors")
    assert weight_files(target) == [single]
    (target / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(single), shard.name)}))
    single.rename(shard)
    assert weight_files(target) == [shard]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", GARBAGE, r"/tokenizer\.json: must be UTF-8, but is not \('utf-8' codec"),
        ("tokenizer.json", b"[]", r"/tokenizer\.json: must hold a JSON object, but holds a list"),
        (
            "tokenizer.json",
            b"{}",
            "target: the tokenizer must be readable by transformers, which reports KeyError",
        ),
        ("tokenizer.json", None, "target: the tokenizer must be readable by transformers, which reports ValueError"),
        ("tokenizer_config.json", b'{"model_max_length": "x"}', "target: the tokenizer must be readable .* TypeError"),
        ("chat_template.jinja", GARBAGE, "target: the tokenizer must be readable by .* UnicodeDecodeError"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(target: Path, name: str, content: bytes | None, message: str) -> None:
    (target / name).unlink() if content is None else (target / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(target)


def test_an_lm_head_that_a_tied_config_ignores_must_equal_the_embeddings(target: Path) -> None:
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    weights = load_file(target / "model.safetensors")
    save_tensors(target / "model.safetensors", {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 1})
    check_weights(target)
    save_tensors(target / "model.safetensors", {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight, .* but differs"):
        check_weights(target)
