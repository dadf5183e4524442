"""Tests that a bar draws in a terminal and writes few lines into a log file."""

import io
import sys

import pytest

from mtptrain.utils import progress
from mtptrain.utils.progress import ProgressBar


def test_a_bar_in_a_log_file_writes_whole_lines_and_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with ProgressBar(total=1000, desc="steps", unit="step") as bar:
        for _ in range(1000):
            bar.update()
            bar.set_postfix(loss="1.0")
    assert log.getvalue().count("\n") == 1 and "\r" not in log.getvalue()
    assert log.getvalue().startswith("steps: 100%") and "1000/1000" in log.getvalue()

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with ProgressBar(total=3, desc="rows") as bar:
        for _ in range(3):
            bar.update()
            bar.refresh()
    assert sum(line.startswith("rows") for line in log.getvalue().splitlines()) > 3
