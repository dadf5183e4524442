"""In every test of warm starts, a setting that is ignored with a warning is an error."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """What is ignored warns; nothing is ignored unless a test says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*which is used, but")
        yield
