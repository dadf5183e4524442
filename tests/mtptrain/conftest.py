"""Provides the tiny target as most tests of decoding use it, and one with as many layers as some heads capture."""

from pathlib import Path

import pytest
import torch

from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.conftest import make_target


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    return load_target(tiny_target, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("deep"), num_hidden_layers=4)
