"""Provides a target that generates printable text, a server with programmable responses, and configs for both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.responses import server as completion_server
from mtptrain.config import PipelineConfig
from tests.conftest import make_config
from tests.data_prep.responses.stage import CHATS, ConfigFor, overrides_for
from tests.data_prep.speaking import FakeServer, fake_server, make_speaking_target


@pytest.fixture(scope="session")
def speaking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking_target(tmp_path_factory.mktemp("speaking"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes retries nearly immediate, and restores torch's number of threads after the test."""
    monkeypatch.setattr(completion_server, "BACKOFF_S", 0.01)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def configure(tmp_path: Path, speaking_target: Path) -> ConfigFor:
    """Returns a function that makes a config for a jsonl file of the given rows."""

    def build(*overrides: str, rows: list[dict[str, Any]] = CHATS, run: str = "run") -> PipelineConfig:
        return make_config(*overrides_for(tmp_path, speaking_target, rows, run), *overrides)

    return build


@pytest.fixture
def by_server(configure: ConfigFor, server: FakeServer) -> ConfigFor:
    return lambda *overrides, **more: configure(f"responses.url={server.url}", *overrides, **more)
