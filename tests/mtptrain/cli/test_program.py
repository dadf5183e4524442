"""Tests that programs refuse mistakes and bad input with a one-line error."""

import ast
import re
from pathlib import Path

import pytest

from mtptrain.cli.arguments import expanded, refuse_additions
from mtptrain.cli.stages import STAGES
from mtptrain.utils.errors import UserError
from tests.programs import ROOT, run_ranks

NO_SETTING = "must be the name of a setting, but no setting has this name;"
MISTAKES = {
    "train.lrr=1": f"train.lrr: {NO_SETTING} did you mean train.lr?",
    "+sed=1": f"sed: {NO_SETTING} did you mean seed?",
    "plan=true": f"plan: {NO_SETTING} it is a command, `mtptrain plan` or `mtptrain verify`",
    "lr=1": f"lr: {NO_SETTING} did you mean train.lr?",
    "train.seed=1": f"train.seed: {NO_SETTING} did you mean seed or acceptance.seed?",
    "deepspeed.steps=1": f"deepspeed.steps: {NO_SETTING} `--cfg job` shows all settings "
    "(+deepspeed.steps=VALUE adds a new one)",
    "head=mtpp": "head: must be one of dflash, dflash2, draft_model, dspark, eagle, eagle3, hydra, medusa, mtp, "
    "native_mtp, peagle, but is mtpp; did you mean mtp?",
    "prompts.paths=[a": "prompts.paths=[a: must be NAME=VALUE, but cannot be read (no viable alternative at input "
    "'[a')",
    "serving.url=http://me:sesame@a/?key=sesame": "serving.url=http://***@a/?key=***: must be NAME=VALUE, but cannot "
    "be read (mismatched input '=' expecting <EOF>)",
    "--multirun": "--multirun: must be given to `mtptrain run`, which runs every stage as a process of its own, but is "
    "given to another program; leave it out",
    "run_dir=???": "run_dir: must be set, but is left out; set run_dir=VALUE",
}


def test_a_mistake_on_the_command_line_is_one_line_that_names_what_was_meant() -> None:
    for arguments, message in MISTAKES.items():
        result = run_ranks("prompts", ["recipe=quickstart", *arguments.split(" ")])
        assert (result.returncode, result.stderr) == (2, f"error: {message}\n")


REFUSED = ["recipe=quickstart", "prompts.source=text_files", "prompts.paths=[/none]"]
MESSAGE = "prompts.paths: must name directories, but '/none' is not one; correct the path"


def test_a_refused_input_is_one_line_and_its_stack_is_shown_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_ranks("prompts", [*REFUSED, f"run_dir={tmp_path}"])
    assert (result.returncode, result.stderr) == (1, f"error: {MESSAGE}\n")
    monkeypatch.setenv("MTPTRAIN_DEBUG", "1")
    result = run_ranks("prompts", [*REFUSED, f"run_dir={tmp_path}"])
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback") and result.stderr.endswith(f"UserError: {MESSAGE}\n")


def texts() -> dict[str, str]:
    """Returns all texts that a user reads, by file: strings of the code, recipes, scripts and pages."""
    found = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder, suffix in (("recipes", "yaml"), ("docs", "md"), ("slurm", "sh"), ("slurm", "sbatch"), (".", "md"))
        for path in (ROOT / folder).glob(f"*.{suffix}" if folder == "." else f"**/*.{suffix}")
    }
    for folder in ("mtptrain", "data_prep", "eval", "slurm", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            found[path.relative_to(ROOT).as_posix()] = "\n".join(text for text in strings if isinstance(text, str))
    return found


def test_every_command_that_is_named_can_be_typed() -> None:
    command = re.compile(r"(?:(?:run|rerun|-m|^|#) |`)mtptrain ([a-z][a-z-]+)", re.MULTILINE)
    named = {(name, stage) for name, text in texts().items() for stage in command.findall(text)}
    assert {stage for _, stage in named} >= set(STAGES)
    assert sorted(each for each in named if each[1] not in STAGES) == []


def test_roles_and_variables_of_the_chat_template_may_be_added() -> None:
    refuse_additions(expanded(["+prompts.roles.bot=assistant", "+prompts.template_kwargs.enable_thinking=false"]))
    refuse_additions(expanded(["+prompts.template_kwargs={enable_thinking: false}", "+deepspeed.steps=1"]))
    with pytest.raises(UserError, match=r"prompts\.role\.bot: must be the name of a setting"):
        refuse_additions(expanded(["+prompts.role.bot=assistant"]))
