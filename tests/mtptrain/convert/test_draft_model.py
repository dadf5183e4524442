"""Tests that published language models and weights of the target become draft models for the target's vocabulary."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtptrain.convert.draft_model import copy_first_layers, initial_weights, start_from_target_model
from mtptrain.convert.warm_start import load_init
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head, save_head
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.loading import load_target
from tests.conftest import FAMILIES, make_target, run_program
from tests.families import IMAGE_MODELS, write_image_model
from tests.mtptrain.convert.draft_models import CPU, DRAFT, Config, load
from tests.mtptrain.train.runs import FP32, figures, train


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_training_computes_the_logits_of_the_published_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Compares with transformers, which reads each document alone."""
    from mtptrain.heads.packing import PackedTokens, Packing

    # transformers adds a token to the tokenizer of a Qwen2 model, so the usual 260 embeddings do not suffice.
    target = make_target(tmp_path / "target", family, FAMILIES[family][1], vocab_size=264)
    settings = FAMILIES[family][1] | {"tie_word_embeddings": tied}
    published = make_target(tmp_path / "draft", family, settings, seed=1, hidden_size=96, vocab_size=264)
    config = Config(init_from=str(published))
    head = build_head(config, read_target_config(target))
    head.load_state_dict(load_init(str(published), config, TargetFiles(target)))
    plain = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    documents = [torch.randint(0, 260, (length,)) for length in (7, 4, 9)]
    packing = Packing.of_spans([len(ids) - 1 for ids in documents])
    packed = PackedTokens(
        torch.zeros(sum(packing.document_lengths), 64),
        torch.cat([ids[:-1] for ids in documents]),
        torch.cat([ids[1:] for ids in documents]),
        packing,
    )
    parts = load_target(target, torch.float32, CPU).parts
    logits = head.logits(head(packed, parts, 1)[0], parts)
    expected = torch.cat([plain(ids[None]).logits[0, 1:] for ids in documents])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_the_targets_sizes_has_its_head_dim() -> None:
    """gpt-oss has attention heads that are wider than hidden_size / num_attention_heads, which is odd."""
    sizes = {"hidden_size": 90, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 260}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    target = AutoConfig.for_model("gpt_oss", **sizes, **experts, num_hidden_layers=1)
    with torch.device("meta"):
        head = build_head(Config(), target)
    assert isinstance(head, DraftModelHead)
    assert (head.config.model_type, head.config.head_dim) == ("llama", 64)


@pytest.mark.parametrize("sample_drafts", [False, True])
def test_a_model_with_fewer_ids_than_the_target_drafts_after_all_of_them(tmp_path: Path, sample_drafts: bool) -> None:
    """Qwen2.5 models of different sizes share a tokenizer, but not the number of padding rows in the embeddings.

    With random weights, the target also generates ids of padding rows.
    """
    paths = [
        make_target(tmp_path / name, vocab_size=size, seed=seed)
        for name, size, seed in (("large", 324, 0), ("small", 260, 1))
    ]
    target = load_target(paths[0], torch.float32, CPU)
    drafter = HeadDrafter(load(paths[1], paths[0]), target.parts, 3, sample_drafts)
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "max_new_tokens": 24}
    sampler = Sampler(1.0 if sample_drafts else 0.0)
    generations = speculate(target, drafter, [[1, 2, 3], [4, 5, 6, 7]], sampler=sampler, **settings)
    assert any(token >= 260 for generation in generations for token in generation.tokens), (
        "the target must generate an id that the small model lacks"
    )
    if not sample_drafts:
        plain = target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert generations[0].tokens == plain[0, 3:].tolist()


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "deepseek_v2"])
def test_a_model_that_is_not_trained_here_drafts_as_it_is(family: str, tmp_path: Path) -> None:
    """The model drafts for itself, so all drafts are accepted."""
    directory = make_target(tmp_path, *FAMILIES[family])
    target = load_target(directory, torch.float32, CPU)
    drafter = HeadDrafter(load(directory, directory), target.parts, 3)
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "max_new_tokens": 12, "sampler": Sampler()}
    (generation,) = speculate(target, drafter, [[1, 2, 3]], **settings)
    assert generation.accepted_at == [generation.rounds] * 3


def test_a_row_that_pads_the_vocabulary_has_the_mean_logit(tmp_path: Path) -> None:
    target, small = make_target(tmp_path / "target", vocab_size=300), make_target(tmp_path / "small", seed=1)
    head = load(small, target)
    states = torch.randn(5, 64)
    logits = head.logits(states, load_target(target, torch.float32, CPU).parts)
    assert logits.shape == (5, 300)
    torch.testing.assert_close(logits[:, 260:], logits[:, :260].mean(1, keepdim=True).expand(-1, 40))


def test_a_head_of_another_run_is_a_start_too(tmp_path: Path, tiny_target: Path) -> None:
    first = Config(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)
    head = build_head(first, read_target_config(tiny_target))
    save_head(tmp_path, head.state_dict(), first, {})
    directory, state = initial_weights(Config(init_from=str(tmp_path)), TargetFiles(tiny_target))
    assert directory == tmp_path and state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("is_image_model", [False, True])
def test_a_start_from_the_target_is_its_first_layers(tmp_path: Path, is_image_model: bool) -> None:
    if is_image_model:  # its files name the language model's tensors otherwise than transformers' model does
        target = write_image_model(tmp_path, *IMAGE_MODELS["qwen3_vl"])
    else:
        target = make_target(tmp_path, num_hidden_layers=3)
    head = build_head(Config(num_hidden_layers=2), read_target_config(target))
    assert isinstance(head, DraftModelHead)
    copy_first_layers(head, TargetFiles(target))
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrower_model_starts_with_the_main_components_of_the_targets_embeddings(tmp_path: Path, tied: bool) -> None:
    target = make_target(tmp_path, tie_word_embeddings=False)
    tensors = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # makes both tables of rank 16
        vocab_size, width = tensors[name].shape
        tensors[name] = torch.randn(vocab_size, 16) @ torch.randn(16, width)
    tensors["model.norm.weight"] = torch.rand(width) + 0.5
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
    head = build_head(Config(**sizes, tie_word_embeddings=tied), read_target_config(target))
    assert isinstance(head, DraftModelHead)
    layer = head.model.layers[0].mlp.up_proj.weight.clone()
    start_from_target_model(head, TargetFiles(target))
    output = tensors["lm_head.weight"] * tensors["model.norm.weight"]
    expected = {"embed_tokens": output if tied else tensors["model.embed_tokens.weight"], "lm_head": output}
    found = {"embed_tokens": head.model.embed_tokens.weight, "lm_head": head.output_weight(load_frozen_parts(target))}
    for name, table in expected.items():
        centred = table - table.mean(0)
        # Angles and relative lengths of rows are preserved, so their dot products agree up to one common factor.
        products, wanted = found[name] @ found[name].T, centred @ centred.T
        torch.testing.assert_close(products / products.norm(), wanted / wanted.norm(), atol=1e-5, rtol=1e-3)
        assert abs(found[name].std() - head.config.initializer_range) < 1e-4
    assert torch.equal(head.model.layers[0].mlp.up_proj.weight, layer)


def test_a_model_without_tokenizer_is_accepted_if_its_vocabulary_has_the_targets_size(
    tmp_path: Path, tiny_target: Path
) -> None:
    shutil.copytree(tiny_target, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    assert load(tmp_path / "model", tiny_target).context_tokens == 512


def test_tied_weights_get_their_gradient_once_whatever_the_ranks_and_zero_stage(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    """Compares two ranks with ZeRO 2 and one rank with ZeRO 0. Also tests that transformers loads the export."""
    run_dir, settings = fresh_run
    shutil.copytree(run_dir, tmp_path / "plain")
    elsewhere = tmp_path / "plain", (*settings, f"run_dir={tmp_path}/plain")
    plain = figures(train(elsewhere, *DRAFT, "deepspeed=zero0", "train.validation_prompts=0"))
    ours = figures(train(fresh_run, *DRAFT, "deepspeed=zero2", FP32, "train.validation_prompts=0", num_ranks=2))
    assert len(ours) == 6 and ours[-1][0] < ours[0][0]
    for one, other in zip(ours, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    result = run_program("export", *settings, *DRAFT)
    assert result.returncode == 0, result.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export/vllm")
    trained = load_file(run_dir / "train/last/head.safetensors")
    written = dict(model.named_parameters())  # lists a tied weight once
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
    assert AutoTokenizer.from_pretrained(run_dir / "export/vllm").get_vocab()["<|end|>"] == 256
