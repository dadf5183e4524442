"""Tests that docs/ builds, and that the commands, settings and files in README.md and docs/ are valid."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed.run import get_args_parser

from mtptrain.cli.stages import STAGES
from mtptrain.config import PipelineConfig, load_config
from mtptrain.settings.heads import HEAD_CONFIGS
from tests.conftest import compose_config

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [path.relative_to(ROOT).as_posix() for path in (README, *PAGES)]
MOST_LINES, MOST_COLUMNS = 110, 100

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)")
REPOSITORY_PATH = re.compile(r"(mtptrain|data_prep|eval|benchmarks|recipes|slurm|tests|docs)/[\w./]*")
SETTING = re.compile(r"(\w+)\.(\w+)(=.*)?")

COMMANDS = ("mtptrain", "torchrun", "python", "make", "sbatch")
RECORDER = """#!/usr/bin/env -S PATH=/usr/bin:/bin bash
printf -v call '%s\\x1f' {name} "$@"
printf '%s\\x1e' "$call" >>{calls}
"""
"""Script that replaces a command of a shell block and records the arguments that the shell passes."""


def text_without_code(page: str) -> str:
    return FENCE.sub("", (ROOT / page).read_text())


def shell_blocks(page: str) -> list[str]:
    return [text for language, text in FENCE.findall((ROOT / page).read_text()) if language == "bash"]


def calls_of(block: str, directory: Path) -> list[list[str]]:
    """Run a block in bash with commands replaced by scripts, and return the name and arguments of each call.

    An unknown command fails.
    """
    calls = directory / "calls"
    scripts = [path.relative_to(ROOT).as_posix() for path in (ROOT / "slurm").glob("*.sh")]
    for name in (*COMMANDS, *scripts):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(RECORDER.format(name=name, calls=calls))
        path.chmod(0o755)
    result = subprocess.run(
        ["/bin/bash", "-euc", block],
        cwd=directory,
        env={"PATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{block}\n{result.stderr}"
    return [call.split("\x1f")[:-1] for call in calls.read_text().split("\x1e")[:-1]]


def check_call(call: list[str]) -> None:
    """Raise an error unless the command exists and takes these arguments."""
    name, *arguments = call
    if name == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=True)
    elif name == "mtptrain":
        check_module(name, arguments)
    elif name == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.module
        check_module(parsed.training_script, parsed.training_script_args)
    elif name == "python":
        assert arguments[0] == "-m"
        check_module(arguments[1], arguments[2:])
    elif name == "sbatch":
        (script,) = (argument for argument in arguments if argument.endswith(".sbatch"))
        assert (ROOT / script).is_file()
        check_overrides([argument for argument in arguments[arguments.index(script) + 1 :] if "=" in argument])
    else:
        check_overrides([argument for argument in arguments if not argument.startswith("-")])


def check_module(module: str, arguments: list[str]) -> None:
    stage = STAGES[arguments[0]] if module == "mtptrain" else None
    module, arguments = (module, arguments) if stage is None else (stage.program, arguments[1:])
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    source = Path(spec.origin).read_text()
    if "run_program(main)" in source if stage is None else stage.takes_settings:
        run_dirs = [check_overrides(variant) for variant in variants_of(arguments)]
        assert len(set(run_dirs)) == len(run_dirs)
    elif (ROOT / module.replace(".", "/")).with_suffix(".py").is_file():
        if "run_benchmark(main" in source:
            source += (ROOT / "benchmarks/command.py").read_text()
            check_overrides([argument for argument in arguments if "=" in argument])
        for argument in arguments:
            assert not argument.startswith("--") or f'"{argument}"' in source, f"{module} has no {argument}"


def variants_of(arguments: list[str]) -> list[list[str]]:
    """Returns the overrides of each run that a command makes: with `--multirun`, one for each variant."""
    if "--multirun" not in arguments:
        return [arguments]
    overrides = OverridesParser.create().parse_overrides([each for each in arguments if each != "--multirun"])
    return BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]


def check_overrides(overrides: list[str]) -> str:
    """Returns the `run_dir`, unless the overrides are wrong. `my.yaml` stands for what `mtptrain init` writes."""
    own = ["recipe=mtp", "target.path=demo", "run_dir=runs/mine"]
    overrides = [word for each in overrides for word in (own if each == "my.yaml" else [each])]
    return load_config(compose_config(*overrides)).run_dir


def settings() -> dict[str, set[str]]:
    """Returns the names of the settings in each group. Group `head` has the settings of all heads."""
    groups = {
        field.name: field.default_factory() for field in fields(PipelineConfig) if callable(field.default_factory)
    }
    names = {name: {field.name for field in fields(group)} for name, group in groups.items() if is_dataclass(group)}
    return names | {"head": {field.name for head in HEAD_CONFIGS.values() for field in fields(head)}}


def prose_lines(page: str) -> Iterator[str]:
    """Yields the lines that have no URL and are neither in a code block nor in a table of docs/results/."""
    for line in text_without_code(page).splitlines():
        if not (page.startswith("docs/results/") and line.startswith("|")) and "http" not in line:
            yield line


def test_the_readme_is_one_page_and_lines_of_pages_fit_a_window() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES
    for page in NAMES:
        assert [line for line in prose_lines(page) if len(line) > MOST_COLUMNS] == [], page


def test_pages_build_without_a_dead_link_or_a_foreign_resource(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) >= len(PAGES)
    for page in built:
        assert not re.search(
            r'(<script[^>]* src|<link[^>]*rel="stylesheet"[^>]* href|<img[^>]* src)="https?:', page.read_text()
        )


def test_links_of_the_readme_lead_to_files() -> None:
    links = [link for link in LINK.findall(README.read_text()) if not link.startswith("http")]
    assert links and [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("page", [name for name in NAMES if shell_blocks(name)])
def test_commands_of_a_page_compose(page: str, tmp_path: Path) -> None:
    for number, block in enumerate(shell_blocks(page)):
        directory = tmp_path / str(number)
        directory.mkdir()
        for call in calls_of(block, directory):
            try:
                check_call(call)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{page}: {' '.join(call)}: {error}") from error


# docs/add_a_head.md names the files and settings of a head that its reader is about to write.
@pytest.mark.parametrize("page", [name for name in NAMES if name != "docs/add_a_head.md"])
def test_settings_and_files_that_a_page_names_exist(page: str) -> None:
    groups = settings()
    for code in INLINE_CODE.findall(text_without_code(page)):
        setting = SETTING.fullmatch(code)
        if setting is not None and setting[1] in groups and setting[2] not in ("json", "py", "safetensors", "sbatch"):
            assert setting[2] in groups[setting[1]], f"{page}: there is no setting {code}"
        if REPOSITORY_PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{page}: there is no {code}"


def test_every_setting_is_in_a_recipe_or_on_a_page() -> None:
    recipes = "\n".join(path.read_text() for path in (ROOT / "recipes").rglob("*.yaml"))
    pages = "\n".join(path.read_text() for path in (README, *PAGES))
    groups = settings()
    names = {f"{group}.{name}" for group, members in groups.items() for name in members}
    names |= {field.name for field in fields(PipelineConfig)} - groups.keys()
    assert {"seed", "train.lr", "head.ttt_steps", "acceptance.dtype"} <= names
    assert {name for name in names if f"{name.split('.')[-1]}:" not in recipes and name not in pages} == set()
