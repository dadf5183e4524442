"""Tests that `mtptrain init` writes a file that composes, for the target and the data, and overwrites none."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from mtptrain import init
from mtptrain.cli.arguments import compose_config
from mtptrain.utils.errors import UserError
from tests.mtptrain.engines.conftest import target_config


def refuse(key: str) -> None:
    raise UserError(f"no {key} here")


def run(*arguments: str) -> None:
    with patch.object(sys, "argv", ["init", *arguments]), patch("mtptrain.init.running_engine", refuse):
        init.main()


def test_a_file_is_written_that_composes_and_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    target_config("llama").save_pretrained(tmp_path / "my model: 1")
    Path("chats.jsonl").write_text("{}\n")
    run("my model: 1")
    config, text = compose_config("my.yaml"), Path("my.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 100
    assert (config.target.path, config.prompts.paths) == ("my model: 1", ["chats.jsonl"])
    assert (config.prompts.source, config.run_dir) == ("responses", "runs/my_model__1_mtp")
    for arguments, message in {
        ("demo",): "--out: must be a new file NAME.yaml, but my.yaml exists; choose another with --out",
        (
            "demo",
            "none.jsonl",
            "--out",
            "b.yaml",
        ): "DATA: must be a file, a folder or a name on the hub, but none",
        ("none/", "--out", "b.yaml"): "TARGET: must be a local directory, a GGUF file, a hub name or `demo`",
    }.items():
        with pytest.raises(SystemExit):
            run(*arguments)
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert Path("my.yaml").read_text() == text and not Path("b.yaml").exists()


def test_a_known_target_gets_its_recipe_and_folders_are_texts(tmp_path: Path) -> None:
    small = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with (
        patch("mtptrain.init.running_engine", refuse),
        patch("mtptrain.init.config_dir"),
        patch("mtptrain.init.read_target_config", lambda _: target_config("llama")),
    ):
        text = init.settings_for(small, [str(tmp_path)], Path("my.yaml"))
    assert "recipe: smollm2_135m_mtp\n" in text and "source: text_files" in text
