"""Provides configs that read small text files or conversations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtptrain.config import PipelineConfig
from tests.data_prep.prompts.documents import FILES, ConfigFor


@pytest.fixture
def text_config(tmp_path: Path, config_for: ConfigFor) -> ConfigFor:
    """Returns a function that makes a config for a directory of small files, about a fifth of them held out."""
    for name, text in FILES.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "texts" / "latin.py").write_bytes(b"# gr\xf6\xdfe\n")
    settings = ("prompts.validation_fraction=0.2", "prompts.max_document_tokens=128")
    return lambda *overrides: config_for(f"prompts.paths=[{tmp_path}/texts]", *settings, *overrides)


@pytest.fixture
def chat_config(tmp_path: Path, config_for: ConfigFor) -> Callable[..., PipelineConfig]:
    """Returns a function that makes a config for a jsonl file of the given rows."""

    def build(rows: list[Any], *overrides: str) -> PipelineConfig:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = ("prompts=conversations", f"prompts.paths=[{path}]", "prompts.validation_fraction=0.3")
        return config_for(*settings, *overrides)

    return build
