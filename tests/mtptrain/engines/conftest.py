"""Builds heads with H=64, I=96, and one attention head and one key/value head of size 64, and exports them.

The target has 4 layers and a vocabulary of 260.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.engines import server as engine_server
from mtptrain.engines.format import Format
from mtptrain.engines.table import format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head, Tensors
from mtptrain.heads.files import build_head
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.families import read_target_config
from tests.mtptrain.engines.fake_server import FakeServer, fake_server

BLOCK_DRAFTERS = ("dflash", "dspark", "dflash2")


def target_config(family: str = "llama", **settings: object) -> PreTrainedConfig:
    defaults = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**defaults, **settings})
    return config


def head_config(name: str, **settings: Any) -> HeadConfig:
    if name in ("eagle3", "peagle", *BLOCK_DRAFTERS):
        settings.setdefault("capture_layers", [1, 2, 3])
    if name == "eagle3":  # without the norms that not all engines have
        settings = {"norm_before_fc": False, "norm_output": False, **settings}
    if name == "dflash2":
        settings.setdefault("selector_top_k", 7)  # llama.cpp serves no more with such small targets
    config: HeadConfig = HEADS[name].Config(**settings)
    return config


def random_head(config: HeadConfig, target: PreTrainedConfig) -> Head:
    """Builds a head with random weights that all differ, and a random d2t."""
    torch.manual_seed(0)
    head = build_head(config, target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        if head.d2t is not None:
            ids = torch.randperm(target.vocab_size)[: len(head.d2t)].sort().values
            head.d2t.copy_(ids - torch.arange(len(ids)))
    return head


def export_head(directory: Path, engine: str, config: HeadConfig, state: Tensors, target_dir: Path) -> Format:
    """Writes all that an export of the head holds but its pages, checks the tensors, and returns the format."""
    form = format_for(engine, config, read_target_config(target_dir))
    write_head(directory, form, state)
    form.add_target(directory, target_dir)
    check_tensors(directory, form)
    return form


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """Runs a fake server, whose counters settle at once."""
    monkeypatch.setattr(engine_server, "SETTLED_AFTER_S", 0.01)
    with fake_server() as server:
        yield server
