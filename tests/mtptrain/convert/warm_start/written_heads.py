"""Writes random heads in the formats of engines, and changes the written files."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.formats import format_for
from mtptrain.export import write_head
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import build_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.families import read_target_config

MTP, EAGLE = MtpHead.Config(), EagleHead.Config()
EAGLE3 = Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48)
DFLASH = DflashHead.Config(capture_layers=[1, 2], mask_token_id=7, num_layers=2, ttt_steps=3)
VARIANTS = {
    "own vocabulary": EAGLE3,
    "shared lm_head": Eagle3Head.Config(capture_layers=[0, 1, 2]),
    "whole vocabulary": Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=260),
    "norms before": Eagle3Head.Config(capture_layers=[0, 2], norm_before_fc=True, norm_before_residual=True),
    "eagle3.1": Eagle3Head.Config(capture_layers=[0, 1, 2], fc_norm=True, norm_output=True),
}


def random_state(config: HeadConfig, target_dir: Path) -> Tensors:
    """Returns random weights of a head.

    Norms differ from one, weights that start at zero are random too, and `d2t` maps draft ids to odd token ids.
    """
    torch.manual_seed(3)
    state = build_head(config, read_target_config(target_dir)).state_dict()
    for name, tensor in state.items():
        if name == "d2t":
            state[name] = torch.arange(len(tensor)) * 2 + 1 - torch.arange(len(tensor))
        elif tensor.ndim == 1 or not tensor.any():
            state[name] = torch.rand_like(tensor) + 0.5
    return state


def write(directory: Path, engine: str, config: HeadConfig, target_dir: Path) -> Tensors:
    """Export a random head and return its weights."""
    state, target_config = random_state(config, target_dir), read_target_config(target_dir)
    form = format_for(engine, config, target_config)
    write_head(directory, form, state)
    form.add_target(directory, target_dir)
    return state


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def rewrite(directory: Path, change: Callable[[Tensors], Tensors], **config: object) -> None:
    """Change a written head's tensors and the settings in its config.json, and delete its serving.json."""
    tensors = change(load_file(directory / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**stored, **config}))
    (directory / "serving.json").unlink(missing_ok=True)


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
