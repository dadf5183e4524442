"""Tests that the help of a stage has all its settings, with what they mean, in columns that fit a terminal."""

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

from mtptrain.cli.help import docstrings, print_help
from mtptrain.cli.stages import STAGES, settings_of
from mtptrain.config import PipelineConfig
from mtptrain.settings.heads import HEAD_CONFIGS

STAGES_WITH_SETTINGS = [name for name, stage in STAGES.items() if stage.takes_settings]


def test_every_setting_has_a_meaning_and_is_read_by_a_stage() -> None:
    sections = {each.name: each.type for each in fields(PipelineConfig) if each.name != "head"}
    kinds = [*HEAD_CONFIGS.values(), *(kind for kind in sections.values() if is_dataclass(kind))]
    for kind in kinds:
        assert isinstance(kind, type)
        assert [each.name for each in fields(kind) if not docstrings(kind).get(each.name)] == []
    read = {section for stage in STAGES.values() for section in stage.reads} | set(docstrings(PipelineConfig))
    assert {*sections, "head"} - read == set()


@pytest.mark.parametrize("stage", STAGES_WITH_SETTINGS)
def test_help_needs_no_recipe_and_fits_a_terminal(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_help(stage, [])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for section in settings_of(stage) if stage in ("run", "plan") else STAGES[stage].reads + STAGES[stage].also_shows:
        assert stage != "responses" or "serving" in STAGES[stage].also_shows
        assert section in ("seed", "deepspeed") or any(line.startswith((f"{section}:", "head=mtp")) for line in lines)


def test_help_has_the_values_of_a_recipe_and_the_settings_of_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_help("train", ["recipe=smollm2_135m_eagle3", "train.lr=1e-5"])
    shown = capsys.readouterr().out
    assert "draft_vocab_size          8192            Size D" in shown and "lr                        1e-05" in shown
    print_help("train", ["head=eagle3"])
    assert "draft_vocab_size          null            Size D" in capsys.readouterr().out


def test_help_says_nothing_once_its_reader_has_ended() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mtptrain", "plan", "--help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
