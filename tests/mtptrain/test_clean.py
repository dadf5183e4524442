"""Tests that `mtptrain clean` frees what can be made again and nothing else, and what `mtptrain doctor` finds."""

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from mtptrain import clean, doctor
from mtptrain.stage_dir import StageDir
from tests.conftest import make_config

MAY_GO = ("hidden_states/manifest.json", "hidden_states/shard_00000.safetensors", "train/checkpoints/step_00000009/a")
STAYS = (
    *("hidden_states/notes.txt", "responses/conversations.jsonl", "train/best/head.json", "export/vllm/a.safetensors"),
    *("train/checkpoints/step_00000010/complete.json", "train/checkpoints/step_00000011/state.safetensors"),
    *("train/checkpoints/step_mine/a", "acceptance/shard_00000.safetensors"),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    for stage in ("hidden_states", "responses", "train", "acceptance"):
        StageDir(run_dir / stage).record(make_config())
    for name in (*MAY_GO, *STAYS):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("a")
    return run_dir


def cleaned(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *arguments: str) -> set[str]:
    """Runs the program, and returns the files that are gone."""
    before = {path for path in run_dir.rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["clean", str(run_dir), *arguments])
    clean.main()
    return {str(path.relative_to(run_dir)) for path in before if not path.exists()}


def test_what_a_run_can_make_again_goes_after_an_answer_and_all_else_stays(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cleaned(monkeypatch, run_dir)
    assert "error: --yes: must be given where nobody can answer" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: "" if "0.0 MB" in question else "y")
    assert cleaned(monkeypatch, run_dir) == set()
    assert cleaned(monkeypatch, run_dir, "--yes") == set(MAY_GO)
    assert "mtptrain hidden-states" in capsys.readouterr().out
    assert cleaned(monkeypatch, run_dir, "--yes") == set(), "nothing is left to free"


def test_hidden_states_that_training_needs_links_and_a_run_in_use_are_left(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage, part in (("train", 0), ("hidden_states", 2)):
        with StageDir(run_dir / stage).writing(part), pytest.raises(SystemExit):
            cleaned(monkeypatch, run_dir, "--yes")
        assert f"must be written by one program at a time, but process {os.getpid()}" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(run_dir)
    for wrong, message in (
        ("link", "must not be a link"),
        ("none", "must be a run's directory"),
        (".", "no such folder"),
    ):
        with pytest.raises(SystemExit):
            cleaned(monkeypatch, tmp_path / wrong, "--yes")
        assert message in capsys.readouterr().err
    for name in ("hidden_states", "train/checkpoints"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (run_dir / name).rename(tmp_path / name)
        (run_dir / name).symlink_to(tmp_path / name)
    assert cleaned(monkeypatch, run_dir, "--yes") == set()
    (run_dir / "hidden_states").unlink()
    (tmp_path / "hidden_states").rename(run_dir / "hidden_states")
    (run_dir / "train/best/head.json").unlink()
    assert cleaned(monkeypatch, run_dir, "--yes") == set()


def test_the_doctor_names_versions_and_what_is_known_whatever_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / ".venv-vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 0.33.1\n")
    python.chmod(0o755)
    monkeypatch.setattr("mtptrain.engines.process.CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    monkeypatch.setattr("mtptrain.engines.llama_cpp.engine.find_llama_server", Mock(side_effect=ImportError("broken")))
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy")
    doctor.main()
    out = capsys.readouterr().out
    rows = {cells[1]: cells[2:4] for line in out.splitlines() if len(cells := [x.strip() for x in line.split("│")]) > 3}
    assert rows["vLLM"][0] == "0.33.1" and rows["vLLM"][1].startswith("exports are for 0.32; ")
    assert rows["SGLang"][0] == "not found" and rows["llama_cpp"] == ["unknown", "ImportError: broken"]
    assert rows["HF_TOKEN"][0] == "set" and "secret" not in out
    assert rows["torch"][0].startswith("2.") and rows["disk here"][1].endswith("GB free")
