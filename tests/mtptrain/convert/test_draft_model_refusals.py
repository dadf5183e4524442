"""Tests that a model that cannot draft for the target, or cannot be trained, is refused with the reason."""

import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import decoding
from eval import serving_bench
from mtptrain.convert.draft_model import copy_first_layers
from mtptrain.convert.warm_start import load_init
from mtptrain.decoding.prompts import check_head_context
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.run import Run
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import FAMILIES, make_config, make_target, run_program
from tests.families import REFUSED, write_member
from tests.mtptrain.convert.draft_models import DRAFT, Config, load


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"intermediate_size": 32},
            "head.intermediate_size: must be 96, as in the target, with head.start_from_target",
        ),
        (
            {"hidden_size": 128},
            "head.hidden_size: must be 64, as in the target, with head.start_from_target=true, but ",
        ),
        ({"num_hidden_layers": 4}, "head.num_hidden_layers: must be at most 2, as in the target, with"),
        ({"tie_word_embeddings": False}, "head.tie_word_embeddings: must be True, as in the target"),
    ],
)
def test_a_start_from_a_target_of_other_sizes_is_refused(
    settings: dict[str, Any], message: str, tiny_target: Path
) -> None:
    head = build_head(Config(**settings), read_target_config(tiny_target))
    assert isinstance(head, DraftModelHead)
    with pytest.raises(ValueError, match=message):
        copy_first_layers(head, TargetFiles(tiny_target))


def test_a_start_from_a_target_whose_family_is_not_trained_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path, *FAMILIES["gemma3_text"])
    head = build_head(Config(), read_target_config(target))
    assert isinstance(head, DraftModelHead)
    message = "head.start_from_target: the draft model's model_type must be gemma3_text, as in the target, but is llama"
    with pytest.raises(ValueError, match=message):
        copy_first_layers(head, TargetFiles(target))


def test_a_start_from_a_target_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    target, name = make_target(tmp_path), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(target / "model.safetensors")
    del tensors[name]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    head = build_head(Config(), read_target_config(target))
    assert isinstance(head, DraftModelHead)
    with pytest.raises(UserError, match=rf"the checkpoint must hold {name}, but does not; download it again"):
        copy_first_layers(head, TargetFiles(target))


def change_config(directory: Path, **settings: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def other_tokenizer(tmp_path: Path) -> Path:
    directory = make_target(tmp_path)
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace('"<user>"', '"<human>"'))
    return directory


def without_tokenizer(tmp_path: Path) -> Path:
    directory = make_target(tmp_path, vocab_size=259)
    (directory / "tokenizer.json").unlink()
    return directory


def without_a_norm(tmp_path: Path) -> Path:
    directory = make_target(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


BAD_MODELS = {
    "a larger vocabulary": (
        lambda path: make_target(path, vocab_size=300),
        r"head\.init_from: the vocabulary must have at most 260 rows, as many as .* has vocab_size 300",
    ),
    "another tokenizer": (other_tokenizer, r"head\.init_from: must have the target's tokenizer, but the vocabulary of"),
    "fewer rows and no tokenizer": (
        without_tokenizer,
        r"head\.init_from: the model and the target must both have tokenizer files, because their vocab_size differs "
        r"\(259 and 260\), but .* has none; copy",
    ),
    "fewer rows than tokens": (
        lambda path: make_target(path, vocab_size=258),
        r"head\.init_from: must have an embedding for each token of its tokenizer, ids up to 259, but .* 258",
    ),
    "no language model": (
        lambda path: change_config(make_target(path), model_type="bert"),
        r"head\.init_from: must be a language model that mtptrain can run, but .* is not: .* in the family 'bert' .*; "
        r"choose another model$",
    ),
    "quantised weights": (
        lambda path: change_config(make_target(path), quantization_config={"quant_method": "fp8"}),
        r"head\.init_from: must be an unquantised model, whose weights can be trained, but .* a quant",
    ),
    "attention that mtptrain does not compute": (
        lambda path: write_member(path, *REFUSED["deepseek_v32"][:2]),
        r"head\.init_from: must be a language model that mtptrain can run, but \S+ is not: the forward of a text "
        r"over a cache must run for a deepseek_v32, .*: mtptrain cannot run this model; choose another draft model",
    ),
    "a missing tensor": (
        without_a_norm,
        r"head\.init_from: model\.norm\.weight of .* must be of shape \(64,\), as its config describes, but is "
        "absent",
    ),
}


@pytest.mark.parametrize("bad", BAD_MODELS)
def test_a_model_that_cannot_draft_for_the_target_is_refused(bad: str, tmp_path: Path, tiny_target: Path) -> None:
    make, message = BAD_MODELS[bad]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_init(str(path), Config(init_from=str(path)), TargetFiles(tiny_target))
    with pytest.raises(ValueError, match=message.replace(r"head\.init_from", r"acceptance\.draft_model")):
        load(path, tiny_target)


def test_a_head_of_another_kind_is_no_language_model(tmp_path: Path, tiny_target: Path) -> None:
    write_sealed(tmp_path / "head.json", {"head": {"name": "mtp"}})
    with pytest.raises(ValueError, match=r"head\.init_from: must be a language model, but .* holds the head mtp; set"):
        build_head(Config(init_from=str(tmp_path)), read_target_config(tiny_target))


def test_a_head_that_was_trained_from_a_model_that_is_gone_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    write_sealed(tmp_path / "head.json", {"head": {"name": "draft_model", "init_from": "/none"}})
    with pytest.raises(UserError, match=r"^acceptance\.draft_model: must be a local directory, .* but '/none'"):
        load(tmp_path, tiny_target)


def test_a_model_that_is_nowhere_is_refused_by_name(tiny_target: Path) -> None:
    with pytest.raises(
        UserError, match=r"head\.init_from: must be a local directory, a GGUF file, a hub name or `demo`, but"
    ):
        build_head(Config(init_from="/none"), read_target_config(tiny_target))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 5}, "head.num_attention_heads: must divide head.hidden_size into head dims that"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "the three are 4, 64 and 3; change one of them"),
    ],
)
def test_sizes_that_no_model_has_are_refused(settings: dict[str, Any], message: str, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(Config(**settings), read_target_config(tiny_target))


def test_a_size_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.hidden_size: must be null or a number from 1 to .*, but is 0"):
        make_config("head=draft_model", "head.hidden_size=0")


def test_sizes_beside_a_published_model_are_refused(tiny_target: Path) -> None:
    message = r"head\.hidden_size: must be left out or 64, as in head\.init_from=.*, but is 32; remove it"
    with pytest.raises(ValueError, match=message):
        build_head(Config(init_from=str(tiny_target), hidden_size=32), read_target_config(tiny_target))


@pytest.mark.parametrize("family", ["mistral with window", "qwen3 with window", "gemma3_text", "deepseek_v2"])
def test_a_model_whose_attention_is_not_trained_here_is_refused_for_training(family: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, *FAMILIES[family])
    message = r"head\.init_from: a draft model that is trained must be one of llama, mistral, qwen2, qwen3 with full"
    with pytest.raises(ValueError, match=message):
        DraftModelHead.check_trainable(Config(init_from=str(target)), read_target_config(target))
    DraftModelHead.check_trainable(Config(), read_target_config(target))  # a model with random weights can be trained


def test_a_loss_between_states_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.feature_weight: must be 0 with head draft_model, .* but is 0.5"):
        make_config("head=draft_model", "train.feature_weight=0.5")
    with pytest.raises(ValueError, match=r"train\.loss\.features: must be 0 with head draft_model, .* but is 0.1"):
        make_config("head=draft_model", "train.loss={kl:1,features:0.1}")


def test_a_model_with_a_short_context_is_refused_before_extraction(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    short = change_config(make_target(tmp_path / "draft", seed=1), max_position_embeddings=100)
    result = run_program("hidden-states", *fresh_run[1], *DRAFT[:2], f"head.init_from={short}")
    assert result.returncode != 0
    assert "prompts.max_document_tokens: documents must have at most 100 tokens, the max_position" in result.stderr


def test_benchmarks_refuse_prompts_that_the_model_cannot_read_with_answer_and_drafts(
    tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, overrides = tiny_run  # prompts of 32 tokens and answers of 16
    short = change_config(make_target(tmp_path / "draft", seed=1), max_position_embeddings=50)
    draft = (*DRAFT[:2], f"head.init_from={short}", "head.start_from_target=false", "acceptance.dtype=float32")
    config = make_config(*overrides, f"run_dir={run_dir}", *draft)
    message = r"^head: must read the longest prompt with its response and drafts, 51 tokens, but has a context .* of 50"
    with pytest.raises(UserError, match=message):
        decoding.measure(config, Namespace(batch_sizes=[1], drafts=[1, 3], prompts=32))
    monkeypatch.setattr(serving_bench, "find_program", lambda _: Path("python"))
    config.serving_bench.num_speculative_tokens = [1, 3]
    with pytest.raises(UserError, match=message):
        serving_bench.prepare(Run(config), tmp_path)


@pytest.mark.parametrize(("num_drafts", "is_refused"), [(20, False), (21, True)])
def test_more_drafts_than_the_context_of_the_model_are_refused(
    num_drafts: int, is_refused: bool, tmp_path: Path, tiny_target: Path
) -> None:
    small = change_config(make_target(tmp_path, seed=1), max_position_embeddings=100)
    head = load(small, tiny_target)
    prompts = [[1] * 70, [1] * 30]
    message = "head: must read the longest prompt with its response and drafts, 101 tokens, but has a context"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        check_head_context(head, prompts, 10, num_drafts, "head")
