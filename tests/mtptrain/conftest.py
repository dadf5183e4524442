"""Provides the tiny target as most tests of decoding use it."""

from pathlib import Path

import pytest
import torch

from mtptrain.target.loading import load_target
from mtptrain.target.model import Target


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    return load_target(tiny_target, torch.float32, torch.device("cpu"))
