"""Provides each test with its own copy of the tiny target and a data directory, which it may damage."""

import shutil
from pathlib import Path

import pytest

from tests.hostile_inputs.damages import Place


@pytest.fixture
def place(tmp_path: Path, tiny_target: Path) -> Place:
    shutil.copytree(tiny_target, tmp_path / "target")
    (tmp_path / "data").mkdir()
    return Place(tmp_path)
