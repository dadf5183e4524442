"""Explains a wrong command line in one line, instead of Hydra's several, and suggests the nearest valid name."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from mtptrain.config import RECIPES
from mtptrain.utils.errors import one_line
from mtptrain.utils.masking import hide_passwords

CONFIG_GROUPS = {path.name for path in Path(RECIPES).iterdir() if path.is_dir()} | {"head"}
"""Names of Hydra's config groups: each selects a file in recipes/ or a head."""

OPEN_SECTIONS = ("deepspeed.", "prompts.roles.", "prompts.template_kwargs.")
"""Sections to which the command line may add names that no recipe has."""


def mistake(error: Exception, arguments: Sequence[str]) -> str:
    """Returns what is wrong with the arguments for which Hydra or OmegaConf raised `error`."""
    text = str(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        path = error.missing_cfg_file  # such as target/NAME, where NAME may be a path too
        group = next((each for each in CONFIG_GROUPS if path.startswith(f"{each}/")), path.rpartition("/")[0])
        return wrong_choice(group, path.removeprefix(f"{group}/"), error.options)
    if found := re.match(r"You must specify '(\w+)'", text):
        if mistyped := get_close_matches(found[1], [each.partition("=")[0] for each in arguments], n=1):
            return unknown_name(mistyped[0], arguments)
        options = text.partition("Available options:")[2].split()
        return f"{found[1]}: must be chosen, but is not; add {found[1]}=NAME, where NAME is one of {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        reason = text.removeprefix(f"Error parsing override '{error.override}'").strip().splitlines()[0]
        return (
            f"{hide_passwords(error.override)}: must be NAME=VALUE, but cannot be read ({reason}); quote or correct it"
        )
    given = [argument.lstrip("+").partition("=")[::2] for argument in arguments]
    if text.startswith("Config group override must be a string or a list") or "is not a subclass of" in text:
        for name, value in given:
            if (name in CONFIG_GROUPS or "/" in name) and not isinstance(yaml.safe_load(value), str):
                return f"{name}: must be the name of a choice, but is {value}; `{name}=` alone lists the names"
    if found := re.match(r"Ambiguous value for argument '(.+?)=(.*)'$", text.splitlines()[0]):
        name, value = found.groups()
        quoted = f"""write "{name}=[{value}]" if it is a list, '{name}="{value}"' if it is one text with commas"""
        choose = "choose one" if name in CONFIG_GROUPS else quoted
        return f"{name}: must be one value, but is {value}; {choose} (mtptrain run --multirun takes several)"
    if found := re.match(r"Multiple values for (\w+)\.|(\w+) appears more than once", text):
        name = found[1] or found[2]
        return f"{name}: must be chosen once and without +, but is not; write {name}=NAME"
    if found := re.match(r"Could not delete from config. '(.+)' does not exist", text):
        return unknown_name(found[1], arguments)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        parts = [name for name, _ in given if name.startswith(f"{cause.full_key}.")]
        if parts and cause.full_key not in dict(given):  # a part of a setting that has no parts
            return unknown_name(parts[0], arguments)
        return wrong_value(cause.full_key, cause, arguments)
    return one_line(text)


def wrong_choice(name: str, given: str, options: Sequence[str]) -> str:
    near = advice(nearest(given, options), "choose one")
    return f"{name}: must be one of {', '.join(options)}, but is {given!r}; {near}"


def unknown_name(name: str, arguments: Sequence[str]) -> str:
    names = setting_names(arguments)
    free = f" (+{name}=VALUE adds a new one)" if name.startswith(OPEN_SECTIONS) else ""
    return (
        f"{name}: must be the name of a setting, but no setting has this name; "
        f"{advice(nearest(name, names), '`--cfg job` shows all settings')}{free}"
    )


def wrong_value(name: str, error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    """Returns what is wrong with a setting's name, or with the value given to it."""
    reason = str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{name}: must be set, but is not; add {name}=VALUE"
    if isinstance(error, ConfigKeyError | AttributeError):
        return unknown_name(name, arguments)
    if found := re.fullmatch(r"Invalid value '(.*)', expected one of \[(.*)\]", reason):
        return wrong_choice(name, found[1], found[2].split(", "))
    if found := re.fullmatch(r"Value '(.*)' of type '.*' could not be converted to (\w+)", reason):
        return f"{name}: must be of type {found[2].lower()}, but is {found[1]!r}; correct it"
    if reason.endswith("is not a ListConfig, list or tuple."):
        return f"{name}: must be a list, but is not; write {name}=[VALUE,...]"
    return f"{name}: must have a valid value, but OmegaConf reports: {reason}; correct it"


def advice(names: Sequence[str], otherwise: str) -> str:
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Returns the names that were probably meant.

    This is a very similar name in the same section, or else settings of the same name in other sections, or else the
    most similar name.
    """
    section, _, last = name.rpartition(".")
    beside = [each for each in known if each.rpartition(".")[0] == section]
    elsewhere = [each for each in known if each.rpartition(".")[2] == last]
    return (
        get_close_matches(name, beside, n=1, cutoff=0.9)
        or get_close_matches(name, elsewhere, n=2, cutoff=0.0)
        or get_close_matches(name, known, n=1, cutoff=0.8)
    )


def setting_names(arguments: Sequence[str]) -> list[str]:
    """Returns the dotted names of all settings of the recipe and head that the arguments choose.

    If these cannot be composed, returns the names of recipe quickstart.
    """
    for chosen in ([each for each in arguments if each.partition("=")[0] in CONFIG_GROUPS], ["recipe=quickstart"]):
        try:
            with initialize_config_dir(RECIPES, version_base="1.3"):
                composed = OmegaConf.to_container(compose("pipeline", chosen))
        except HydraException:
            continue
        assert isinstance(composed, dict)
        return ["recipe", *dotted(composed)]
    return []


def dotted(section: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
