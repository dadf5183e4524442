"""Tests which Medusa heads in the layouts of vLLM and FasterDecoding are read, and which are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.warm_start import load_init
from mtptrain.heads.files import build_head, save_head
from mtptrain.heads.hydra import HydraHead
from mtptrain.heads.medusa import MedusaHead
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.mtptrain.convert.warm_start.written_heads import assert_equal, random_state, write

CONFIG = MedusaHead.Config(ttt_steps=3, num_layers=2, fc_bias=True)
FASTER_DECODING = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


def publish(directory: Path, state: Tensors, lm_heads: list[torch.Tensor], prefix: str = "") -> None:
    """Write a head with the tensor names and config of FasterDecoding's trainer."""
    tensors = {re.sub(r"blocks\.(\d)\.layers\.(\d)", rf"{prefix}\1.\2.linear", name): x for name, x in state.items()}
    tensors |= {f"{prefix}{depth}.2.weight": lm_head.clone() for depth, lm_head in enumerate(lm_heads)}
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps(FASTER_DECODING))


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
def test_the_published_layout_is_read(tmp_path: Path, tiny_target: Path, prefix: str) -> None:
    state, lm_head = random_state(CONFIG, tiny_target), load_frozen_parts(tiny_target).lm_head
    publish(tmp_path / "head", state, [lm_head] * 3, prefix)
    assert_equal(load_init(str(tmp_path / "head"), CONFIG, TargetFiles(tiny_target)), state)


def test_a_trained_lm_head_is_ignored_with_a_warning(tmp_path: Path, tiny_target: Path) -> None:
    state, lm_head = random_state(CONFIG, tiny_target), load_frozen_parts(tiny_target).lm_head
    publish(tmp_path / "head", state, [lm_head, lm_head * 2, lm_head])
    with pytest.warns(UserWarning, match=r"lm_heads\.1\.weight should equal the target's, which is used, but differs"):
        assert_equal(load_init(str(tmp_path / "head"), CONFIG, TargetFiles(tiny_target)), state)


def test_a_pickle_is_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FASTER_DECODING))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has none; convert medusa_lm_head\.pt to safetensors first \(it is a pickle"):
        load_init(str(tmp_path), CONFIG, TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ttt_steps": 5}, r"but differ in head\.ttt_steps \(3 there, 5 here\); set head\.ttt_steps=3, or choose"),
        ({"num_layers": 1}, r"but differ in head\.num_layers \(2 there, 1 here\); set head\.num_layers=2"),
        ({"fc_bias": False}, r"but differ in head\.fc_bias \(True there, False here\); set head\.fc_bias=true"),
    ],
)
def test_other_settings_than_the_heads_are_refused(
    tmp_path: Path, tiny_target: Path, settings: dict[str, object], message: str
) -> None:
    write(tmp_path / "head", "vllm", CONFIG, tiny_target)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), MedusaHead.Config(**{**vars(CONFIG), **settings}), TargetFiles(tiny_target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_attention_heads": 4},
            r"config\.json: must hold only settings that mtptrain understands, .*, but has num_attention_heads=4",
        ),
        ({"vocab_size": 261}, r"config\.json: vocab_size must be 260 for this target, but is 261; choose another head"),
        ({"truncated_vocab_size": 100}, r"config\.json: truncated_vocab_size must be 260 .*, but is 100"),
        ({"num_heads": 5}, r"config\.json: num_heads must be 3, as many as have tensors, but is 5; download"),
        ({"num_hidden_layers": 1}, r"config\.json: num_hidden_layers must be 2, as many as have tensors, but is 1"),
        ({"hidden_size": 128}, r"config\.json: hidden_size must be 64 for this target, but is 128"),
        ({"logit_scale": 0.5}, r"config\.json: logit_scale must be 1\.0, as in our heads, but is 0\.5"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, tiny_target: Path, change: dict[str, object], message: str
) -> None:
    write(tmp_path / "head", "vllm", CONFIG, tiny_target)
    path = tmp_path / "head/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), CONFIG, TargetFiles(tiny_target))


def test_an_lm_head_of_another_vocabulary_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    publish(tmp_path / "head", random_state(CONFIG, tiny_target), [torch.ones(261, 64)] * 3)
    message = r"head\.init_from: lm_heads\.0\.weight of .* must have 260 rows, the target's vocabulary, but has 261; "
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), CONFIG, TargetFiles(tiny_target))


@pytest.mark.parametrize("config", [CONFIG, HydraHead.Config(ttt_steps=3, num_layers=2)], ids=["medusa", "hydra"])
def test_a_head_of_ours_is_read_only_with_its_own_depths(
    tmp_path: Path, tiny_target: Path, config: MedusaHead.Config | HydraHead.Config
) -> None:
    """These heads have separate weights for each depth, unlike heads of one decoder layer."""
    state = random_state(config, tiny_target)
    save_head(tmp_path / "best", state, config, {})
    assert_equal(load_init(str(tmp_path / "best"), config, TargetFiles(tiny_target)), state)
    with pytest.raises(ValueError, match=r"but differ in head\.ttt_steps \(3 there, 2 here\)"):
        load_init(str(tmp_path / "best"), type(config)(**{**vars(config), "ttt_steps": 2}), TargetFiles(tiny_target))


@pytest.mark.parametrize("config", [MedusaHead.Config(), HydraHead.Config()], ids=["medusa", "hydra"])
def test_a_new_head_starts_as_the_targets_own_state(
    tiny_target: Path, config: MedusaHead.Config | HydraHead.Config
) -> None:
    head = build_head(config, read_target_config(tiny_target))
    state = torch.randn(5, 64)
    for depth in range(config.ttt_steps):
        inputs = [state, *torch.randn(1 + depth, 5, 64)]
        out = head.blocks[depth](state) if isinstance(head, MedusaHead) else head.mlps[depth](*inputs)
        torch.testing.assert_close(out, state)
