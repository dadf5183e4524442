"""Tests that the plan says which engines this machine has, and what is known of them."""

from pathlib import Path

import pytest

from mtptrain.serving.found_engines import describe_engines
from mtptrain.settings.evaluation import ServingConfig


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.32.0", "vLLM 0.32.0: tested; on a CPU it samples wrongly with drafts above temperature 0"),
        ("0.33.1", "vLLM 0.33.1: not tested; it has no medusa"),
        ("0.40.0", "vLLM 0.40.0: tested is 0.32"),
    ],
)
def test_versions_are_named_with_what_is_known_of_them(tmp_path: Path, version: str, known: str) -> None:
    python = program(tmp_path / "python", f"echo {version}")
    server = program(tmp_path / "llama-server", "echo 'version: 9.9.9 (build 7)' >&2")
    found = describe_engines(ServingConfig(python=python, llama_server=server))
    other = program(tmp_path / "other", "echo hello")
    assert "llama.cpp: not found" in describe_engines(ServingConfig(python=python, llama_server=other))
    assert found.splitlines() == [known, "llama.cpp 9.9.9 (build 7): tested is b11434"]


def test_an_engine_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    lines = describe_engines(ServingConfig(python=missing, llama_server=missing)).splitlines()
    assert lines[0].startswith("vLLM: not found (run `make .venv-vllm/.installed`")
    assert lines[1].startswith("llama.cpp: not found (run `make .engines/llama_cpp/.installed`")
