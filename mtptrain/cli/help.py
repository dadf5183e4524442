"""Prints what `mtptrain STAGE --help` says: the settings that a stage reads, with their values and docstrings."""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args

from omegaconf import OmegaConf

from mtptrain.cli.arguments import composed, hydra_value
from mtptrain.cli.mistakes import CONFIG_GROUPS
from mtptrain.cli.stages import STAGES, settings_of
from mtptrain.config import RECIPES, PipelineConfig
from mtptrain.settings.heads import HEAD_CONFIGS

WIDTH, NAME_WIDTH, VALUE_WIDTH = 98, 28, 16


def print_help(stage: str, arguments: Sequence[str]) -> None:
    """Print the settings of a stage: with a recipe or a YAML file the values that it has then, otherwise the defaults.

    Raises:
        UserError: if the recipe or a setting is wrong.
    """
    has_recipe = any(each.startswith("recipe=") or "=" not in each for each in arguments)
    chosen = {name: value for name, _, value in (each.partition("=") for each in arguments)}
    given: Any = composed(arguments, values_of) if has_recipe else values_of(PipelineConfig)
    head = given["head"]["name"] if has_recipe else chosen.get("head", "mtp")
    if not has_recipe:
        given["head"] = values_of(HEAD_CONFIGS[head]) if head in HEAD_CONFIGS else {}
    values = "their values here" if has_recipe else "their defaults"
    print(f"usage: mtptrain {stage} recipe=NAME|my.yaml [NAME=VALUE ...]\n\n{STAGES[stage].does}\n")
    for group in sorted(CONFIG_GROUPS):
        names = sorted(HEAD_CONFIGS) if group == "head" else sorted(x.stem for x in Path(RECIPES, group).glob("*.yaml"))
        print(*wrap(f"{group}={', '.join(names)}", WIDTH, subsequent_indent="    "), sep="\n")
    print(f"\nSettings, {values}, and what they mean. Those of a section are given as SECTION.NAME=VALUE.")
    sections = settings_of(stage) if stage in ("run", "plan") else STAGES[stage].reads + STAGES[stage].also_shows
    kinds = {each.name: HEAD_CONFIGS.get(head) if each.name == "head" else each.type for each in fields(PipelineConfig)}
    own = [each for each in fields(PipelineConfig) if not is_dataclass(kinds[each.name])]
    print(*rows(PipelineConfig, [x for x in own if x.name != "deepspeed" or x.name in sections], given), sep="\n")
    for section in dict.fromkeys(sections):
        kind = kinds[section]
        if isinstance(kind, type) and is_dataclass(kind):
            title = f"head={head}" if section == "head" else f"{section}: {(kind.__doc__ or '').splitlines()[0]}"
            print("", *wrap(title, WIDTH), *rows(kind, fields(kind), given[section]), sep="\n")


def rows(kind: type, settings: Sequence[Field[Any]], given: Mapping[str, Any]) -> Iterator[str]:
    for each in settings:
        value = "(must be set)" if given[each.name] == "???" else hydra_value(given[each.name])
        meaning = docstrings(kind).get(each.name, "")
        kinds = [x for x in (each.type, *get_args(each.type)) if isinstance(x, type) and issubclass(x, StrEnum)]
        if choices := [x for kind in kinds for x in kind]:
            meaning += f" One of {', '.join(choices)}."
        text = wrap(meaning, WIDTH - NAME_WIDTH - VALUE_WIDTH) or [""]
        start = f"  {each.name:<{NAME_WIDTH - 2}}"
        if len(value) >= VALUE_WIDTH:
            yield from wrap(value, WIDTH, initial_indent=start, subsequent_indent=" " * NAME_WIDTH)
        else:
            yield f"{start}{value:<{VALUE_WIDTH}}{text.pop(0)}".rstrip()
        yield from (" " * (NAME_WIDTH + VALUE_WIDTH) + line for line in text)


def values_of(config: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)


@cache
def docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings of a dataclass's fields, which Python does not keep, on one line each."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        file = sys.modules[each.__module__].__file__
        assert file is not None
        body = next(x.body for x in parsed(file).body if isinstance(x, ast.ClassDef) and x.name == each.__name__)
        for setting, text in pairwise(body):
            if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(setting.target)] = " ".join(ast.literal_eval(text.value).replace("`", "").split())
    return found


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())
