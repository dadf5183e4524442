"""Tests what is read from a target's configs, what heads take from them, its identity, and the packaged target."""

import json
import math
import shutil
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from mtptrain.data.identity import TargetIdentity
from mtptrain.data.prompt_files import is_held_out
from mtptrain.heads.layers import Rope
from mtptrain.target.families import head_rope_parameters
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import DEMO_DIR, load_tokenizer, weights_fingerprint
from mtptrain.target.loading import load_target
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer
from tests.families import IMAGE_MODELS
from tests.mtptrain.target.inputs import write_config


def test_the_language_model_of_an_image_model_is_tied_and_quantised_as_the_whole_is(tmp_path: Path) -> None:
    """Older configs have the settings of the language model beside those of the whole."""
    method = {"quant_method": "awq", "bits": 4}
    for name, is_flat in (("qwen3_vl", False), ("qwen2_5_vl", False), ("qwen2_5_vl", True)):
        family, settings = IMAGE_MODELS[name]
        AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        whole = json.loads(path.read_text())
        text = whole["text_config"]
        del text["model_type"], text["tie_word_embeddings"]
        if is_flat:
            whole = {**text, **{key: value for key, value in whole.items() if key != "text_config"}}
        for is_tied in (True, False):
            path.write_text(json.dumps({**whole, "tie_word_embeddings": is_tied, "quantization_config": method}))
            target = TargetFiles(tmp_path)
            assert target.config.tie_word_embeddings == is_tied and target.config.quantization_config == method
            assert target.has_image_encoder and target.config.model_type in ("qwen2", "qwen3")


def test_heads_take_the_rope_of_gemmas_full_attention(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = write_config(tmp_path, model_type="gemma3_text", max_position_embeddings=512, **old)
    assert head_rope_parameters(config) == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    head_rope_parameters(config)["rope_theta"] = 0.0  # a copy
    cos, _ = Rope(64, head_rope_parameters(config), 512).tables(torch.tensor([100]), torch.float32)
    wanted = [math.cos(100 / 8 * 1e6 ** (-2 * pair / 64)) for pair in range(32)]
    torch.testing.assert_close(cos[0, 0], torch.tensor(wanted * 2), atol=1e-5, rtol=0)


def identity(directory: Path) -> TargetIdentity:
    return TargetIdentity.of(TargetFiles(directory, "name"))


def test_identity_tells_config_tokenizer_and_template_apart(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path / "base"))
    assert identity(make_target(tmp_path / "again")) == base
    assert identity(make_target(tmp_path / "config", rms_norm_eps=1e-4)).config_sha256 != base.config_sha256
    template = identity(make_target(tmp_path / "template", chat_template=GENERATION_TEMPLATE + " "))
    assert template.chat_template_sha256 != base.chat_template_sha256
    assert template.tokenizer_sha256 == base.tokenizer_sha256
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert identity(tmp_path / "again").tokenizer_sha256 != base.tokenizer_sha256


def test_a_change_to_any_one_tensor_changes_the_identity(tmp_path: Path) -> None:
    path = Path(shutil.copytree(DEMO_DIR, tmp_path / "target")) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path)
    base = weights_fingerprint(path.parent)
    for changed in tensors:
        save_file({name: tensor * 1.5 if name == changed else tensor for name, tensor in tensors.items()}, path)
        assert weights_fingerprint(path.parent) != base, changed


def test_the_packaged_target_has_the_published_loss_on_files_of_this_machines_library() -> None:
    """Allows 25 % plus 0.5 nats more, because another Python has other files. Random weights have ln 4096 = 8.3."""
    figures = json.loads((DEMO_DIR / "figures.json").read_text())
    target = load_target(DEMO_DIR, torch.float32, torch.device("cpu"))
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if is_held_out(path.name, 0.1)]
    tokenizer, losses = load_tokenizer(DEMO_DIR), []
    for path in files:
        ids = torch.tensor(tokenizer(path.read_text()[:1000])["input_ids"][:160])
        losses.append(torch.nn.functional.cross_entropy(target.model(ids[None]).logits[0, :-1], ids[1:]))
    published = figures["held_out_source_by_position"]["nats_per_token"].values()
    assert len(losses) > 10 and sum(losses) / len(losses) < 1.25 * max(published) + 0.5
