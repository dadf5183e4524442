"""Turns the warning about an ignored tensor or setting into an error in every test of warm starts."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """Raises the warning as an error, except where a test expects it with `pytest.warns`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*which is used, but")
        yield
