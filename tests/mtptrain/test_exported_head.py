"""Tests that an exported directory holds the right tensors, and that the reloaded head makes the same proposals."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.decoding.export_proof import DRAFTS, ROUNDS, propose, prove_equal_proposals, random_documents
from mtptrain.engines.table import engine_of, format_for
from mtptrain.export import check_tensors, reload_head, write_head
from mtptrain.heads import HEADS
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, check_head_target, save_head
from mtptrain.heads.layers import head_dims
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.init_from.start import load_init
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import random_head
from tests.sealed import seal_again

CONFIG = MtpHead.Config()


@pytest.fixture
def exported(tmp_path: Path, tiny_target: Path) -> Path:
    torch.manual_seed(0)
    form = format_for("vllm", CONFIG, read_target_config(tiny_target))
    write_head(tmp_path / "vllm", form, build_head(CONFIG, form.target).state_dict())
    return tmp_path / "vllm"


def test_the_reloaded_head_proposes_the_same_and_a_damaged_one_does_not(exported: Path, tiny_target: Path) -> None:
    torch.manual_seed(0)
    form, parts = format_for("vllm", CONFIG, read_target_config(tiny_target)), load_frozen_parts(tiny_target)
    head = build_head(CONFIG, form.target).eval()
    assert prove_equal_proposals(parts, head, reload_head(exported, form)) == 8 * (ROUNDS + 1) * DRAFTS
    tensors = load_file(exported / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, 1)  # puts the columns of the hidden state first
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(UserError, match="must propose the same tokens as the trained one"):
        prove_equal_proposals(parts, head, reload_head(exported, form))


def test_the_proof_compares_every_depth_that_a_head_is_bound_to_and_confidences(tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    parts = load_frozen_parts(tiny_target).to(torch.device("cpu"), torch.float32)
    head = random_head(MedusaHead.Config(ttt_steps=5), target_config).eval()
    document = random_documents(head, parts)
    before = propose(head, parts, *document).tokens
    with torch.no_grad():
        head.blocks[4].layers[0].weight.neg_()
    after = propose(head, parts, *document).tokens
    assert before.shape == (8, ROUNDS + 1, 5) and torch.equal(before[..., :-1], after[..., :-1])
    assert not torch.equal(before[..., -1], after[..., -1])
    head = random_head(DsparkHead.Config(capture_layers=[1, 2], ttt_steps=3), target_config).eval()
    assert prove_equal_proposals(parts, head, deepcopy(head)) > 100
    other = deepcopy(head)
    assert isinstance(other, DsparkHead)
    other.calibrate(1.5, -1)
    with pytest.raises(UserError, match="must propose the same tokens as the trained one, as surely, but"):
        prove_equal_proposals(parts, head, other)


def test_a_missing_unknown_or_misshapen_tensor_is_an_error(exported: Path, tiny_target: Path) -> None:
    whole, form = load_file(exported / "model.safetensors"), format_for("vllm", CONFIG, read_target_config(tiny_target))
    for tensors, message in (
        ({name: x for name, x in whole.items() if name != "hnorm.weight"}, r"hnorm\.weight must be .* but is absent"),
        (whole | {"extra.weight": torch.zeros(3)}, r"extra\.weight must be absent, but is of shape \(3,\)"),
        (whole | {"fc.weight": torch.zeros(64, 64)}, r"fc\.weight must be of shape \(64, 128\), but is of shape"),
    ):
        save_file(tensors, exported / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_tensors(exported, form)


def test_a_directory_whose_name_switches_vllms_method_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    """A recipe such as `llama3_1_8b_eagle3` writes to a folder of the same name, which is right for head eagle3."""
    target = read_target_config(tiny_target)
    forms = {name: format_for("vllm", HEADS[name].Config(), target) for name in ("eagle", "eagle3")}
    engine = engine_of("vllm")
    for name, method in (("eagle-head", "eagle"), ("llama_eagle3", "eagle3")):
        engine.check_directory(tmp_path / name / "vllm", forms[method])
    for name, method in (("eagle-head", "eagle3"), ("my_eagle3", "eagle"), ("DFlash", "eagle")):
        message = rf"export\.output_dir: vLLM must not infer a method other than {method} from the path, but"
        with pytest.raises(ValueError, match=message):
            engine.check_directory(tmp_path / name / "vllm", forms[method])


def test_the_heads_head_dim_is_one_that_engines_have_kernels_for(tiny_target: Path) -> None:
    """In Qwen3-4B and Qwen3-32B, hidden size / attention heads is 80, for which engines lack kernels."""
    target_config = read_target_config(tiny_target)
    for config, message in (
        (MtpHead.Config(num_attention_heads=2), r"attention_heads: the head dim must be one of \(64, 128\), .* is 32"),
        (MtpHead.Config(num_key_value_heads=2), r"value_heads: must divide the 1 attention heads, but is 2"),
        (EagleHead.Config(head_dim=80), r"head_dim: the head dim must be .* but is 80 .*; set head\.head_dim=64"),
    ):
        with pytest.raises(ValueError, match=message):
            build_head(config, target_config)
    for size, heads, expected in ((2560, 32, 20), (4096, 32, 32)):
        target_config.hidden_size, target_config.num_attention_heads = size, heads
        assert head_dims(CONFIG, target_config).num_attention_heads == expected
    target_config.hidden_size = 96
    with pytest.raises(UserError, match=r"but is 96 with 1 heads .*; set head=eagle3 head\.head_dim=64$"):
        head_dims(CONFIG, target_config)


def test_a_stored_head_has_defaults_for_newer_settings_and_is_refused_unless_it_fits(
    tmp_path: Path, tiny_target: Path
) -> None:
    head, whole = tmp_path / "head", build_head(CONFIG, read_target_config(tiny_target)).state_dict()
    save_head(head, whole, CONFIG, {"step": 3})
    stored = json.loads((head / "head.json").read_text())
    del stored["head"]["prenorm_states"]
    seal_again(head / "head.json", **stored)
    load_init(str(head), CONFIG, TargetFiles(tiny_target))
    other = make_target(tmp_path / "target", intermediate_size=80)
    prenorm = replace(CONFIG, prenorm_states=True)
    for config, target, message in (
        (prenorm, tiny_target, r"must be those of the config, but differ in head\.prenorm_states \(False there"),
        (CONFIG, other, r"mlp\.\w+_proj\.weight must be of shape .* for head mtp and this target, but is"),
    ):
        with pytest.raises(UserError, match=message):
            load_init(str(head), config, TargetFiles(target))
    with pytest.raises(UserError, match=rf"head\.json: must have the entries {TARGET_WEIGHTS}, but lacks"):
        check_head_target(head, TargetFiles(tiny_target))
    for state, reason in (
        ({key: torch.full_like(tensor, torch.nan) for key, tensor in whole.items()}, "finite numbers, but has NaN or"),
        ({key: tensor.int() for key, tensor in whole.items()}, r"floating-point numbers of .* but has torch\.int32"),
    ):
        save_head(head, state, CONFIG, {})
        with pytest.raises(UserError, match=rf"head: \S+ must hold {reason}.*; copy or download it again"):
            load_init(str(head), CONFIG, TargetFiles(tiny_target))
    write_sealed(head / "head.json", {"head": [1]})
    message = r"head\.json: head must be the settings of one of .*, but is \[1\].*; copy it again, or train again"
    with pytest.raises(UserError, match=message):
        load_init(str(head), CONFIG, TargetFiles(tiny_target))
