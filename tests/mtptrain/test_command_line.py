"""The command line of every program: old names of settings, and the programs that refuse them."""

import re
from pathlib import Path

import pytest

from mtptrain.command_line import RENAMED, refuse_renamed
from tests.conftest import make_config
from tests.programs import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_its_new_one(old: str, prefix: str) -> None:
    with pytest.raises(SystemExit) as refused:
        refuse_renamed(["recipe=quickstart", f"{prefix}{old}=1"])
    assert (
        refused.value.code
        == f"{old}: must be given by its new name, {RENAMED[old]}, but is given as {prefix}{old}=1; rename it"
    )


def test_new_names_and_values_that_contain_an_old_one_are_accepted() -> None:
    refuse_renamed([*(f"{new}=1" for new in RENAMED.values()), "run_dir=train.clip_norm", "train.recompute_all=1"])


def test_every_new_name_is_a_setting() -> None:
    config = make_config()
    for new in RENAMED.values():
        section, name = new.split(".")
        assert hasattr(getattr(config, section), name)


@pytest.mark.parametrize("module", ["data_prep.prompts", "mtptrain.train", "eval.acceptance"])
def test_a_program_refuses_an_old_name(module: str) -> None:
    result = run_ranks(module, ["recipe=quickstart", "train.recompute=true"])
    assert result.returncode == 1
    assert (
        "must be given by its new name, train.activation_checkpointing, but is given as train.recompute=true"
        in result.stderr
    )


def test_every_program_with_a_config_has_this_command_line() -> None:
    sources = {
        path: path.read_text()
        for package in ("mtptrain", "data_prep", "eval")
        for path in (ROOT / package).rglob("*.py")
    }
    programs = [path for path, text in sources.items() if re.search(r"^@program\ndef main\(", text, re.MULTILINE)]
    assert len(programs) == 14
    assert [path.name for path, text in sources.items() if "hydra.main(" in text] == ["command_line.py"]
