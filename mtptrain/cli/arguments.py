"""Turns the arguments of a stage into Hydra's overrides, and composes the settings that they stand for.

An argument may be a YAML file of one's own, whose settings are nested as in a recipe and which names its recipe:

    recipe: mtp
    target: {path: /models/mine}
    prompts: {paths: chats.jsonl}
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtptrain.cli.mistakes import (
    CONFIG_GROUPS,
    OPEN_SECTIONS,
    TYPES,
    Arguments,
    advice,
    mistake,
    unknown_name,
)
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.utils.errors import UserError, refusing

T = TypeVar("T")

LISTS = {name for name, kind in TYPES.items() if "list[" in str(kind)}
"""The settings that are lists. A single value given for one of them is a list of this value."""


def expanded(arguments: Sequence[str]) -> Arguments:
    """Returns the arguments with a YAML file, a folder of recipes and single values in place of lists expanded.

    Raises:
        UserError: if there are two files, or a file cannot be read.
    """
    files = [each for each in arguments if each.endswith((".yaml", ".yml")) and "=" not in each and each[0] != "-"]
    if len(files) > 1:
        raise UserError(f"{files[1]}: must be the only YAML file, but {files[0]} is given too; put all settings in one")
    words = with_recipes([each for each in arguments if each not in files])
    typed = [as_list(each) for each in words if "=" in each and each[0] != "-"]
    options = [each for each in words if "=" not in each or each[0] == "-"]
    given = {each.partition("=")[0] for each in typed}
    settings = settings_in(files[0]) if files else {}
    own = [as_list(override(name, value)) for name, value in settings.items() if name not in given]
    # Hydra's parser of options takes overrides in one piece only.
    return Arguments([*options, *own, *typed], files[0] if files else None, frozenset(settings) - given)


def with_recipes(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with Hydra's `--config-dir` as a setting, which the stages of a run can be given too."""
    found, rest = [], []
    words = iter(arguments)
    for word in words:
        option, has_value, folder = word.partition("=")
        if option not in ("--config-dir", "-cd"):
            rest.append(word)
            continue
        path = Path(folder if has_value else next(words, ""))
        if not path.is_dir():
            raise UserError(
                f"{option}: must name a folder that has recipes of yours in recipe/NAME.yaml, but is '{path}'; correct "
                "the path"
            )
        found.append(quoted(f"file://{path.resolve()}"))
    return [f"hydra.searchpath=[{','.join(found)}]", *rest] if found else rest


def as_list(argument: str) -> str:
    name, _, value = argument.partition("=")
    if name not in LISTS or value.startswith(("${", "'${")):
        return argument
    (parsed,) = OverridesParser.create().parse_overrides([argument])
    is_single = not parsed.is_sweep_override() and isinstance(parsed.value(), str | int | float)
    return f"{name}=[{value}]" if is_single else argument


def settings_in(file: str) -> dict[str, Any]:
    """Returns the settings of a YAML file, as `flattened` does."""
    path = Path(file)
    if not path.is_file():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob("*.y*ml")], n=1)
        meant = advice([str(path.parent / each) for each in near], "`mtptrain init TARGET DATA` writes one")
        raise UserError(f"{file}: must be a YAML file with settings, but there is no such file; {meant}")
    with refusing(f"{file}: must be YAML", "correct it", "OmegaConf"):
        loaded = OmegaConf.load(path)
        nested = OmegaConf.to_container(loaded) if isinstance(loaded, DictConfig) else None
    if not isinstance(nested, dict):
        raise UserError(f"{file}: must hold settings such as `recipe: mtp`, but holds none; correct it")
    return flattened(nested)


def flattened(nested: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns nested settings by dotted name. A head's `name`, and a word in place of a section, choose."""
    settings: dict[str, Any] = {}
    for section, value in nested.items():
        if isinstance(value, Mapping):
            settings |= {f"{section!s}.{name!s}": each for name, each in value.items()}
        elif value is not None:  # as where all lines of a section are comments
            settings[str(section)] = value
    return {"head" if name == "head.name" else name: value for name, value in settings.items()}


def override(name: str, value: Any) -> str:
    """Returns the setting as an override. Sections that are open may get names that no recipe has."""
    if name in CONFIG_GROUPS:
        return f"{name}={quoted(str(value))}"
    return f"{'++' if f'{name}.'.startswith(OPEN_SECTIONS) else ''}{name}={hydra_value(value)}"


def hydra_value(value: Any) -> str:
    """Returns a value of a YAML file in the grammar of Hydra's overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value) if isinstance(value, int | float) else quoted(str(value))


def quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z/][\w./-]*", text) and text.lower() not in ("true", "false", "null", "inf", "nan")
    return text if is_plain else QuotedString(text, Quote.single).with_quotes()


def refuse_additions(arguments: Arguments) -> None:
    """Raises UserError if +NAME=VALUE adds a setting, which Hydra accepts but nothing reads."""
    for argument in arguments.overrides:
        name = argument.split("=")[0].lstrip("+")
        is_open = name in CONFIG_GROUPS or f"{name}.".startswith(OPEN_SECTIONS)
        if argument.startswith("+") and not is_open and name not in TYPES:
            raise UserError(unknown_name(name, arguments))


def compose_config(*arguments: str) -> PipelineConfig:
    """Returns the checked settings of `mtptrain STAGE ARGUMENTS`: a YAML file, overrides like `train.lr=1e-4`, or both.

    Raises:
        UserError: if an argument is wrong, with the line that the command line prints.
    """
    return composed(arguments, load_config)


def composed(arguments: Sequence[str], read: Callable[[DictConfig], T]) -> T:
    """Returns what `read` makes of the config that Hydra composes."""
    given = Arguments([])
    try:
        given = expanded(arguments)
        refuse_additions(given)
        with initialize_config_dir(RECIPES, version_base="1.3"):
            return read(compose("pipeline", given.overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(mistake(error, given)) from error
