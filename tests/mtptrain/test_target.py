"""The frozen target: partial reading, its cache by position, its identity."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtptrain.identity import TargetIdentity, weights_fingerprint
from mtptrain.target import (
    DEMO_DIR,
    SUPPORTED_MODEL_TYPES,
    PositionCache,
    load_frozen_parts,
    load_target,
    load_tokenizer,
    read_target_config,
    resolve_target,
)
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("shards", ["single", "sharded"])
@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_frozen_parts_alone_give_the_whole_models_logits(
    tmp_path: Path, model_type: str, shards: str, tie_word_embeddings: bool
) -> None:
    make_target(tmp_path, model_type, tie_word_embeddings=tie_word_embeddings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if shards == "sharded":
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = load_frozen_parts(tmp_path)
    input_ids = torch.arange(20)[None]
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    with torch.no_grad():
        reference = model(input_ids).logits
    torch.testing.assert_close(parts.logits(parts.final_norm(before_norm[0])), reference, atol=1e-5, rtol=1e-5)
    assert torch.equal(parts.embed(input_ids), model.get_input_embeddings()(input_ids))
    assert (parts.lm_head is parts.embed_tokens) == tie_word_embeddings


def test_going_back_to_an_earlier_position_forgets_what_was_written_there(tiny_target: Path) -> None:
    target = load_target(tiny_target, torch.float32, CPU)
    right, wrong = torch.arange(1, 13)[None], torch.tensor([[9, 9, 9]])
    positions = torch.arange(12)[None]
    cache = PositionCache(20)
    target.forward(right[:, :6], positions[:, :6], cache)
    target.forward(wrong, positions[:, 6:9], cache)
    resumed = target.forward(right[:, 6:], positions[:, 6:], cache)
    whole = target.forward(right, positions, PositionCache(20))
    torch.testing.assert_close(resumed, whole[:, 6:], atol=1e-5, rtol=1e-5)


def identity(directory: Path) -> TargetIdentity:
    return TargetIdentity.of("name", None, directory, load_tokenizer(directory))


def test_identity_tells_weights_config_tokenizer_and_template_apart(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path / "base"))
    assert identity(make_target(tmp_path / "again")) == base
    other_weights = identity(make_target(tmp_path / "weights", seed=1))
    assert other_weights.weights_sha256 != base.weights_sha256 and other_weights.config_sha256 == base.config_sha256
    assert identity(make_target(tmp_path / "config", rms_norm_eps=1e-4)).config_sha256 != base.config_sha256
    template = identity(make_target(tmp_path / "template", chat_template=GENERATION_TEMPLATE + " "))
    assert template.chat_template_sha256 != base.chat_template_sha256 and template.tokenizer_sha256 == base.tokenizer_sha256
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert identity(tmp_path / "again").tokenizer_sha256 != base.tokenizer_sha256


def test_fine_tuning_one_tensor_changes_the_identity(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path)
    assert identity(tmp_path).weights_sha256 != base.weights_sha256


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"target\.path: the target's family must be one of llama, .* but is 'gpt2'"):
        read_target_config(tmp_path)


def test_a_checkpoint_without_its_final_norm_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the checkpoint must hold model\.norm\.weight, but does not; it is incomplete"):
        load_frozen_parts(tmp_path)


def test_a_directory_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"target\.path: must be a model directory, but .* has no config\.json"):
        resolve_target(str(tmp_path))
    make_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"target\.path: weights must be safetensors files, but .* does not exist"):
        load_frozen_parts(tmp_path)


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"target\.path: must be a local directory, a hub name or `demo`, but 'no/such' is not"
    ):
        resolve_target("no/such")


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_a_target_with_a_sliding_window_is_refused(tmp_path: Path, model_type: str) -> None:
    window = {"use_sliding_window": True, "max_window_layers": 1} if model_type == "qwen2" else {}
    make_target(tmp_path, model_type, sliding_window=16, **window)
    with pytest.raises(
        ValueError, match=r"must reach over its whole context of 512 tokens, but has sliding_window 16 in .*config\.json"
    ):
        read_target_config(tmp_path)


def test_a_change_to_any_one_tensor_changes_the_identity() -> None:
    import shutil
    import tempfile

    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as name:
        directory = Path(shutil.copytree(DEMO_DIR, Path(name) / "target"))
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors, directory / "model.safetensors")
        base = weights_fingerprint(directory)
        for changed in tensors:
            save_file(
                {key: tensor * 1.5 if key == changed else tensor for key, tensor in tensors.items()},
                directory / "model.safetensors",
            )
            assert weights_fingerprint(directory) != base, changed
