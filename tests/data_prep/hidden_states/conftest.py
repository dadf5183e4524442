"""Provides runs whose prompts are finished and whose hidden states are to be extracted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtptrain.config import PipelineConfig
from tests.data_prep.hidden_states.stage import LENGTHS, ConfigFor, make_documents, write_prompts


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores torch's number of threads, which extraction changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prepared(config_for: ConfigFor, tiny_target: Path) -> ConfigFor:
    """Returns a function that writes the prompts of a run and returns its config."""

    def build(*overrides: str, lengths: list[int] = LENGTHS) -> PipelineConfig:
        config = config_for("hidden_states.shard_tokens=60", *overrides)
        write_prompts(Path(config.run_dir), tiny_target, make_documents(lengths))
        return config

    return build
