"""Tests that published language models and the target's weights become draft models, or are refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.prompts import check_head_context
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.engines.table import format_for
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.init_from.from_target import start_from_target
from mtptrain.init_from.start import load_draft_model, load_init
from mtptrain.settings.heads import DraftModelConfig
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import FAMILIES, Run, make_config, make_target, run_program, tiers
from tests.families import IMAGE_MODELS, REFUSED, write_image_model, write_member
from tests.mtptrain.engines.conftest import export_head

CPU = torch.device("cpu")


def load(path: Path | str, target: Path) -> DraftModelHead:
    return load_draft_model(str(path), TargetFiles(target), torch.float32, CPU)


def draft_model(target: Path, **settings: Any) -> DraftModelHead:
    head = build_head(DraftModelConfig(**settings), read_target_config(target))
    assert isinstance(head, DraftModelHead)
    return head


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", tiers(["llama", "qwen2", "qwen3"], core=["llama"]))
@torch.no_grad()
def test_training_computes_the_logits_of_the_published_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Compares with transformers, which reads each document alone."""
    # transformers adds a token to the tokenizer of a Qwen2 model, so the usual 260 embeddings do not suffice.
    target = make_target(tmp_path / "target", family, FAMILIES[family][1], vocab_size=264)
    settings = FAMILIES[family][1] | {"tie_word_embeddings": tied}
    published = make_target(tmp_path / "draft", family, settings, seed=1, hidden_size=96, vocab_size=264)
    head = draft_model(target, init_from=str(published))
    head.load_state_dict(load_init(str(published), DraftModelConfig(init_from=str(published)), TargetFiles(target))[1])
    plain = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    documents = [torch.randint(0, 260, (length,)) for length in (7, 4, 9)]
    packing = Packing.of_spans([len(ids) - 1 for ids in documents])
    read, following = torch.cat([ids[:-1] for ids in documents]), torch.cat([ids[1:] for ids in documents])
    packed = PackedTokens(torch.zeros(sum(packing.document_lengths), 64), read, following, packing)
    parts = load_target(target, torch.float32, CPU).parts
    logits = head.logits(head(packed, parts, 1)[0], parts)
    expected = torch.cat([plain(ids[None]).logits[0, 1:] for ids in documents])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sample_drafts", [False, True])
def test_a_model_with_fewer_ids_than_the_target_drafts_after_all_of_them(tmp_path: Path, sample_drafts: bool) -> None:
    """Qwen2.5 models of different sizes share a tokenizer, but not the number of padding rows in the embeddings.

    With random weights, the target also generates ids of padding rows.
    """
    large = make_target(tmp_path / "large", vocab_size=324)
    head, target = load(make_target(tmp_path / "small", seed=1), large), load_target(large, torch.float32, CPU)
    drafter = HeadDrafter(head, target.parts, 3, sample_drafts)
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "max_new_tokens": 24}
    sampler = Sampler(1.0 if sample_drafts else 0.0)
    generations = speculate(target, drafter, [[1, 2, 3], [4, 5, 6, 7]], sampler=sampler, **settings)
    assert any(token >= 260 for each in generations for token in each.tokens), "an id that the small model lacks"
    if not sample_drafts:
        plain = target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert generations[0].tokens == plain[0, 3:].tolist()
    states = torch.randn(5, 64)  # a row that pads the vocabulary has the mean logit
    logits = head.logits(states, target.parts)
    torch.testing.assert_close(logits[:, 260:], logits[:, :260].mean(1, keepdim=True).expand(-1, 64))


def test_experts_that_the_files_have_apart_are_read_as_transformers_joins_them(tmp_path: Path) -> None:
    directory = make_target(tmp_path, *FAMILIES["qwen3_moe"])
    state = load_init(str(directory), DraftModelConfig(init_from=str(directory)), TargetFiles(directory))[1]
    joined = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    assert not state.keys() <= load_file(directory / "model.safetensors").keys()
    assert all(torch.equal(tensor, joined[name]) for name, tensor in state.items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "granitemoe"])
@torch.no_grad()
def test_an_export_has_the_names_of_published_checkpoints(tmp_path: Path, family: str) -> None:
    """Engines read experts by these names. transformers joins them when it loads, and then has other names."""
    experts = {} if family == "llama" else {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    directory = make_target(tmp_path / "published", family, experts, tie_word_embeddings=False)
    target, config = TargetFiles(directory), DraftModelConfig(init_from=str(directory))
    state = load_init(str(directory), config, target)[1]
    export_head(tmp_path / "head", "vllm", config, state, directory)
    written, published = (load_file(each / "model.safetensors") for each in (tmp_path / "head", directory))
    assert written.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in written.items())
    form = format_for("vllm", config, target.config)
    again = form.state(form.read(tmp_path / "head"))
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


def test_a_start_from_the_target_is_its_first_layers_and_other_sizes_are_refused(
    tmp_path: Path, tiny_target: Path
) -> None:
    # The files of an image model name the language model's tensors otherwise than transformers' model does.
    image_model = write_image_model(tmp_path / "image", *IMAGE_MODELS["qwen3_vl"])
    for target in (make_target(tmp_path / "target", num_hidden_layers=3), image_model):
        head = draft_model(target, num_hidden_layers=2)
        start_from_target(head, TargetFiles(target))
        stored = load_file(target / "model.safetensors")
        tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in stored.items()}
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())
    gemma = make_target(tmp_path / "gemma", *FAMILIES["gemma3_text"])
    sizes = {"intermediate_size": 32, "num_hidden_layers": 4}
    message = r"head\.start_from_target: .* has intermediate_size 32, not 96, num_hidden_layers 4, not at most 2; leave"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tiny_target, sizes, message),
        (gemma, {}, r"has model_type llama, not gemma3_text"),
    ]
    for target, settings, message in cases:
        with pytest.raises(UserError, match=message):
            start_from_target(draft_model(target, **settings), TargetFiles(target))


def change_config(directory: Path, **settings: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    return directory


def other_tokenizer(tmp_path: Path) -> Path:
    path = make_target(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace('"<user>"', '"<human>"'))
    return tmp_path


def without_tokenizer(tmp_path: Path, vocab_size: int = 259) -> Path:
    (make_target(tmp_path, vocab_size=vocab_size) / "tokenizer.json").unlink()
    return tmp_path


def without_a_norm(tmp_path: Path) -> Path:
    path = make_target(tmp_path) / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"}, path, {"format": "pt"})
    return tmp_path


BAD_MODELS: list[tuple[Callable[[Path], Path | str], str]] = [
    (lambda path: "/none", r"head\.init_from: must be a local directory, a GGUF file, a hub name or .*, unlike '/n"),
    (lambda path: make_target(path, vocab_size=300), r"a draft model must have at most 260 rows .*_size 300"),
    (other_tokenizer, r"a draft model must have the target's tokenizer, but its vocabulary differs"),
    (without_tokenizer, r"a draft model and the target must both have tokenizer .* \(259 and 260\), but .* has none"),
    (lambda path: make_target(path, vocab_size=258), r"must have an embedding for each .* 259, but .* 258"),
    (lambda path: change_config(make_target(path), model_type="bert"), r"but this one is none \(.* family 'bert'"),
    (lambda path: change_config(make_target(path), quantization_config={"quant_method": "fp8"}), r"be unquantised, so"),
    (without_a_norm, r"model\.norm\.weight must be of shape \(64,\) .* is absent"),
    (lambda path: write_member(path, *REFUSED["deepseek_v32"][:2]), r"must be .* can run as a target, .* over a cache"),
]  # fmt: skip


def test_a_model_that_cannot_draft_for_the_target_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    for number, (make, message) in enumerate(BAD_MODELS):
        path = make(tmp_path / str(number))
        with pytest.raises(ValueError, match=message):
            load_init(str(path), DraftModelConfig(init_from=str(path)), TargetFiles(tiny_target))
        with pytest.raises(ValueError, match=message.replace(r"head\.init_from", r"acceptance\.draft_model")):
            load(path, tiny_target)
    assert load(without_tokenizer(tmp_path / "equal", 260), tiny_target).context_tokens == 512


def test_heads_and_settings_that_make_no_draft_model_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    write_sealed(tmp_path / "head.json", {"head": {"name": "mtp"}})
    with pytest.raises(ValueError, match=r"must be a language model, but holds the head mtp; choose"):
        draft_model(tiny_target, init_from=str(tmp_path))
    write_sealed(tmp_path / "head.json", {"head": {"name": "draft_model", "init_from": "/none"}})
    with pytest.raises(UserError, match=r"^head\.init_from: must be a local directory, .* unlike '/none'"):
        load(tmp_path, tiny_target)
    for settings, message in (
        ({"init_from": str(tiny_target), "hidden_size": 32}, r"head\.hidden_size: must be left out or 64, as in"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "the three are 4, 64 and 3; change one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            draft_model(tiny_target, **settings)
    message = r"head\.init_from: a draft model that is trained must be one of llama, mistral, qwen2, qwen3 with"
    for family in ("mistral with window", "deepseek_v2"):
        target = make_target(tmp_path / family, *FAMILIES[family])
        with pytest.raises(ValueError, match=message):
            DraftModelHead.check_trainable(DraftModelConfig(init_from=str(target)), read_target_config(target))
        DraftModelHead.check_trainable(DraftModelConfig(), read_target_config(target))  # random weights can be trained


def test_a_model_of_the_targets_sizes_has_its_head_dim() -> None:
    """gpt-oss has attention heads that are wider than hidden_size / num_attention_heads, which is odd."""
    sizes = {"hidden_size": 90, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 260}
    with torch.device("meta"):
        head = build_head(DraftModelConfig(), AutoConfig.for_model("gpt_oss", **sizes, num_local_experts=2))
    assert isinstance(head, DraftModelHead)
    assert (head.config.model_type, head.config.head_dim) == ("llama", 64)


def test_prompts_that_the_model_cannot_read_with_answer_and_drafts_are_refused(
    fresh_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    with pytest.raises(ValueError, match=r"train\.loss\.features: must be 0 with head draft_model, .* but is 0"):
        make_config("head=draft_model", "train.loss={kl:1,features:0.1}")
    short = change_config(make_target(tmp_path / "draft", seed=1), max_position_embeddings=50)
    head = load(short, tiny_target)
    check_head_context(head, [[1] * 20, [1] * 10], 10, 20, "head")  # the last draft is not read
    message = r"^head: must read the longest prompt with its response and drafts, 51 tokens, but has a context .* of 50"
    with pytest.raises(UserError, match=message):
        check_head_context(head, [[1] * 20, [1] * 10], 10, 21, "head")
    settings = ("head=draft_model", "head.ttt_steps=1", f"head.init_from={short}")
    result = run_program("hidden-states", *fresh_run[1], *settings)
    assert result.returncode != 0
    assert "prompts.max_document_tokens: documents must have at most 50 tokens, the max_position" in result.stderr
