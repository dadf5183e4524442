"""Tests that the plan says which engines this machine has, and what is known of them."""

from pathlib import Path

import pytest

from mtptrain.serving.found_engines import describe_engines
from mtptrain.serving.llama_server import find_llama_server
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.utils.errors import UserError


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
    openvino = program(tmp_path / "openvino", "echo 2026.4.1.0")
    found = describe_engines(ServingConfig(python=python, llama_server=server, openvino_python=openvino))
    others = ["llama.cpp 9.9.9 (build 7): tested is b11434", "OpenVINO GenAI 2026.4.1.0: tested is 2026.4.1"]
    assert found.splitlines() == [known, *others]
    other = program(tmp_path / "other", "echo hello")
    assert "llama.cpp: not found" in describe_engines(ServingConfig(python=python, llama_server=other))
    with pytest.raises(UserError, match=f"but {other} does not print its version; run `{other} --version` to see why"):
        find_llama_server(other)


def test_an_engine_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    serving = ServingConfig(python=missing, llama_server=missing, openvino_python=missing)
    lines = describe_engines(serving).splitlines()
    assert lines[0].startswith("vLLM: not found (run `make .venv-vllm/.installed`")
    assert lines[1].startswith("llama.cpp: not found (run `make .engines/llama_cpp/.installed`")
    assert lines[2].startswith("OpenVINO GenAI: not found (run `make .venv-openvino/.installed`")
    other = tmp_path / "other"
    other.touch()
    lines = describe_engines(ServingConfig(python=str(other), llama_server=missing, openvino_python=str(other)))
    denied = f"not found ([Errno 13] Permission denied: '{other}')"
    assert f"vLLM: {denied}" in lines and f"OpenVINO GenAI: {denied}" in lines
