"""Tests that runs start from a head of theirs or of others, and can measure it before training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.heads.files import TARGET_WEIGHTS, check_head_target, save_head
from mtptrain.init_from.start import load_init, trained_or_initial_head
from mtptrain.settings.heads import DraftModelConfig, HeadConfig, HydraConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_target
from tests.mtptrain.init_from.written_heads import EAGLE3, MTP, Stored, assert_equal, random_state
from tests.sealed import seal_again

CPU = torch.device("cpu")


def test_a_run_without_a_trained_head_takes_the_initial_one_and_then_its_own(
    tmp_path: Path, heads: dict[str, Stored]
) -> None:
    head, target = heads["eagle3"], TargetFiles(heads["eagle3"].target_dir)
    config = replace(EAGLE3, init_from=str(head.directory))
    found = trained_or_initial_head(tmp_path, config, target, None, CPU)
    assert_equal(found.head.state_dict(), head.state)
    assert not found.is_trained and found.directory == head.directory

    trained = {name: tensor if name == "d2t" else tensor * 2 for name, tensor in head.state.items()}
    for name in ("last", "best"):  # the last head counts until one was measured
        save_head(tmp_path / name, trained, EAGLE3, {TARGET_WEIGHTS: target.weights_sha256})
        found = trained_or_initial_head(tmp_path, config, target, None, CPU)
        assert_equal(found.head.state_dict(), trained)
        assert found.is_trained and found.directory == tmp_path / name

    with pytest.raises(UserError, match=r"must hold a trained head, but has no head\.json; run mtptrain train first"):
        trained_or_initial_head(tmp_path / "none", EAGLE3, target, None, CPU)


SMALL = DraftModelConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48)


@pytest.mark.parametrize("config", [MTP, EAGLE3, HydraConfig(num_layers=2), SMALL], ids=lambda each: each.name)
def test_a_head_of_ours_is_read_whatever_its_start_and_its_depths_unless_each_has_weights(
    tmp_path: Path, tiny_target: Path, config: HeadConfig
) -> None:
    state, target, path = random_state(config, tiny_target), TargetFiles(tiny_target), tmp_path / "head.json"
    has_mlps, is_small = isinstance(config, HydraConfig), config is SMALL
    stored = config if has_mlps else replace(config, ttt_steps=7, init_from=None if is_small else "/elsewhere")
    save_head(tmp_path, state, stored, {TARGET_WEIGHTS: "of another target"})
    own = DraftModelConfig(init_from=str(tmp_path)) if is_small else config  # the sizes are those of the stored model
    assert_equal(load_init(str(tmp_path), own, target)[1], state)
    if has_mlps:
        with pytest.raises(ValueError, match=r"but differ in head\.ttt_steps"):
            load_init(str(tmp_path), replace(config, ttt_steps=2), target)
    facts = json.loads(path.read_text())
    seal_again(path, **facts | {"head": facts["head"] | {"of_tomorrow": 64}})
    with pytest.raises(ValueError, match=r"head\.json: must hold only settings of head .* has of_tomorrow=64; "):
        load_init(str(tmp_path), own, target)


def test_a_stored_head_has_defaults_for_newer_settings_and_is_refused_unless_it_fits(
    tmp_path: Path, tiny_target: Path
) -> None:
    head, whole = tmp_path / "head", random_state(MTP, tiny_target)
    save_head(head, whole, MTP, {"step": 3})
    stored = json.loads((head / "head.json").read_text())
    del stored["head"]["prenorm_states"]
    seal_again(head / "head.json", **stored)
    load_init(str(head), MTP, TargetFiles(tiny_target))
    other = make_target(tmp_path / "target", intermediate_size=80)
    prenorm = replace(MTP, prenorm_states=True)
    for config, target, message in (
        (prenorm, tiny_target, r"must be those of the config, but differ in head\.prenorm_states \(False there"),
        (MTP, other, r"mlp\.\w+_proj\.weight must be of shape .* for head mtp and this target, but is"),
    ):
        with pytest.raises(UserError, match=message):
            load_init(str(head), config, TargetFiles(target))
    with pytest.raises(UserError, match=rf"head\.json: must have the entries {TARGET_WEIGHTS}, but lacks"):
        check_head_target(head, TargetFiles(tiny_target))
    for state, reason in (
        ({key: torch.full_like(tensor, torch.nan) for key, tensor in whole.items()}, "finite numbers, but has NaN or"),
        ({key: tensor.int() for key, tensor in whole.items()}, r"floating-point numbers of .* but has torch\.int32"),
    ):
        save_head(head, state, MTP, {})
        with pytest.raises(UserError, match=rf"head: \S+ must hold {reason}.*; copy or download it again"):
            load_init(str(head), MTP, TargetFiles(tiny_target))
    write_sealed(head / "head.json", {"head": [1]})
    message = r"head\.json: head must be the settings of one of .*, but is \[1\].*; copy it again, or train again"
    with pytest.raises(UserError, match=message):
        load_init(str(head), MTP, TargetFiles(tiny_target))
