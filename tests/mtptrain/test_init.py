"""Tests that `mtptrain init` writes a file that composes, for the target and the data, and overwrites none."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import PreTrainedConfig

from mtptrain import init
from mtptrain.cli.arguments import compose_config
from mtptrain.config import RECIPES
from mtptrain.engines.table import format_for
from mtptrain.utils.errors import UserError
from tests.mtptrain.engines.conftest import target_config
from tests.published_targets import PUBLISHED_TARGETS


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


SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "vocab_size": 49_152}
GEMMA3 = {"hidden_size": 640, "num_hidden_layers": 18, "vocab_size": 262_144}


def written(path: str, config: PreTrainedConfig, *data: str) -> tuple[str, str]:
    with (
        patch("mtptrain.init.running_engine", refuse),
        patch("mtptrain.init.config_dir"),
        patch("mtptrain.init.read_target_config", lambda _: config),
    ):
        return init.settings_for(path, list(data), Path("my.yaml"))


def test_every_target_of_a_recipe_is_known_by_its_sizes_and_folders_are_texts(tmp_path: Path) -> None:
    others = {"smollm2_135m": target_config("llama", **SMOLLM2), "gemma3_270m": target_config("gemma3_text", **GEMMA3)}
    targets = others | {name: target.config() for name, target in PUBLISHED_TARGETS.items()}
    assert targets.keys() | {"demo"} == {path.stem for path in Path(RECIPES, "target").glob("*.yaml")}
    for name, config in targets.items():
        text, _ = written("/models/mine", config, str(tmp_path))
        assert f"recipe: {name}_mtp #" in text and "source: text_files" in text


def test_a_gguf_file_gets_a_head_that_llama_cpp_serves_and_the_command_that_installs_it(tmp_path: Path) -> None:
    text, line = written("mine.gguf", target_config("llama", **SMOLLM2))
    (tmp_path / "my.yaml").write_text(text)
    config = compose_config(str(tmp_path / "my.yaml"))
    assert (config.export.engine, config.head.name, config.head.draft_vocab_size) == ("llama_cpp", "eagle3", 8192)
    assert format_for("llama_cpp", config.head, target_config("llama", **SMOLLM2))
    assert line == "\nA run needs no engine. To serve its head by llama_cpp: no llama_cpp here"
    with patch("mtptrain.init.missing_engines", lambda: {"llama_cpp": "no llama_cpp here"}):
        text, line = written("mine.gguf", target_config("llama", **SMOLLM2))
    assert "engine: vllm #" in text and not line, "an engine that is found comes before one that reads the file"
    text, _ = written("mine.gguf", target_config("gemma3_text", **GEMMA3))  # no head of which llama.cpp serves
    assert "recipe: gemma3_270m_mtp #" in text and "engine: vllm #" in text
