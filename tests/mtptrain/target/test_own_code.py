"""Tests that a target's own Python code never runs, whatever its configs name and whoever answers yes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.target.families import read_target_config
from mtptrain.target.hub import load_tokenizer
from mtptrain.target.loading import load_target
from tests.conftest import make_target

EVIL_TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
EVIL_MODEL = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tokenizer": (
        "tokenizer_config.json",
        {**EVIL_TOKENIZER, "tokenizer_class": "Evil"},
        r"tokenizer_class must be a class of transformers, because mtptrain never runs .*, but is 'Evil'",
    ),
    "nameless tokenizer": (
        "tokenizer_config.json",
        {**EVIL_TOKENIZER, "tokenizer_class": None},
        r"tokenizer_class must be a class of transformers",
    ),
    "old tokenizer": (
        "tokenizer_config.json",
        {"auto_map": ["evil.Evil", None], "tokenizer_class": "Evil"},
        r"tokenizer_class must be a class of transformers",
    ),
    "model": (
        "config.json",
        {**EVIL_MODEL, "model_type": "evil"},
        r"model_type must be a family of transformers, because mtptrain never runs a target's own code, but is 'evil'",
    ),
    "kernels": ("config.json", {"attn_implementation": "evil/kernels"}, r"attn_implementation must be unset, because"),
    "kernels by layer": ("config.json", {"_attn_implementation": {"": "a/b"}}, r"attn_implementation must be unset"),
    "experts": ("config.json", {"experts_implementation": "evil/moe"}, r"experts_implementation must be unset"),
}
IGNORED = {
    "tokenizer": ("tokenizer_config.json", EVIL_TOKENIZER),
    "model": ("config.json", EVIL_MODEL),
    "generation": ("generation_config.json", {"auto_map": {"AutoGenerationConfig": "evil.Evil"}}),
    "processor": ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}),
    "preprocessor": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "evil.Evil"}}),
}


def evil_target(directory: Path, file: str, settings: dict[str, Any]) -> Path:
    path = make_target(directory) / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | settings))
    # An absolute path, because transformers would run a copy of evil.py elsewhere.
    (directory / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(directory)!r}, 'it_ran').touch()\nclass Evil: pass\n"
    )
    return directory


def load_all(directory: Path) -> None:
    read_target_config(directory)
    load_tokenizer(directory)
    load_target(directory, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers every question with yes, as `yes | mtptrain ...` does."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_needs_its_own_code_is_refused_and_the_code_does_not_run(tmp_path: Path, case: str) -> None:
    file, settings, message = REFUSED[case]
    directory = evil_target(tmp_path / "target", file, settings)
    with pytest.raises(ValueError, match=rf"{file}: {message}"):
        load_all(directory)
    assert not (directory / "it_ran").exists()


@pytest.mark.parametrize("case", IGNORED)
def test_the_code_of_a_target_that_transformers_knows_is_ignored(tmp_path: Path, case: str) -> None:
    directory = evil_target(tmp_path / "target", *IGNORED[case])
    load_all(directory)
    assert not (directory / "it_ran").exists()


@pytest.mark.parametrize("case", ["tokenizer", "model"])
def test_a_program_asks_nothing_on_stdin(tmp_path: Path, case: str) -> None:
    directory = evil_target(tmp_path / "target", *REFUSED[case][:2])
    (tmp_path / "a.py").write_text("x = 1\n")
    command = [sys.executable, "-m", "mtptrain", "prompts", "recipe=quickstart", f"run_dir={tmp_path}/run"]
    more = [f"target.path={directory}", f"prompts.paths=[{tmp_path}]"]
    home = {"HF_HOME": str(tmp_path / "cache")}
    ran = subprocess.run([*command, *more], input="y\n" * 9, capture_output=True, text=True, env=os.environ | home)
    assert ran.returncode == 1 and "[y/N]" not in ran.stdout + ran.stderr
    assert "because mtptrain never runs a target's own code" in ran.stderr
    assert not (directory / "it_ran").exists()
