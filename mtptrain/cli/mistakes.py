"""Explains a wrong command line in one line: what must hold, what is given, and what to do.

Hydra advises to add an unknown setting, and suggests no name; OmegaConf says which of its classes a value is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import MissingMandatoryValue, ValidationError
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mtptrain.config import RECIPES, PipelineConfig
from mtptrain.settings.heads import HEAD_CONFIGS
from mtptrain.utils.errors import one_line
from mtptrain.utils.masking import hide_passwords

CONFIG_GROUPS = {path.name for path in Path(RECIPES).iterdir() if path.is_dir()} | {"head"}
"""Names of Hydra's config groups: each selects a file in recipes/ or a head."""

OPEN_SECTIONS = ("deepspeed.", "head.rope_parameters.", "prompts.roles.", "prompts.template_kwargs.")
"""Sections to which the command line may add names that no recipe has."""

REPLACED = {
    r"plan|verify": "it is a command, `mtptrain plan` or `mtptrain verify`",
    r"serving\.(\w+_)?(python|server)": "set serving.program",
    r"serving_bench\.output_dir": "set serving.output_dir, in which serving_bench is made",
    r"planner\.(hidden_states|train)_peak_share": "set planner.hidden_states_tokens_per_s or train_tokens_per_s",
    r"responses\.api_key_variable": "set the environment variable OPENAI_API_KEY",
    r"train\.resume": "training continues from the newest checkpoint, and starts from scratch in another run_dir",
    r"(train\.)?learning_rate": "did you mean train.lr?",
    r"(train\.)?num_(train_)?epochs": "did you mean train.epochs?",
    r"(train\.)?(train_|micro_|per_device_train_)?batch_size": "did you mean train.batch_tokens?",
    r"(.*\.)?max_(seq_len(gth)?|sequence_length|length)": "did you mean prompts.max_document_tokens?",
    r"(base_)?model(_name|_path|_name_or_path|\..*)?|target\.(model|name).*": "did you mean target.path?",
    r"(data|dataset)(_path|_name|\..*)?|prompts\.(data|dataset|files?)": "did you mean prompts.paths?",
}
"""What to do instead of giving settings of earlier versions, or of other programs, where a similar name does not say
it."""

TYPES: dict[str, Any] = {each.name: each.type for each in fields(PipelineConfig)} | {
    f"{section.name}.{each.name}": each.type
    for section in fields(PipelineConfig)
    for kind in (HEAD_CONFIGS.values() if section.name == "head" else [section.default_factory])
    if is_dataclass(kind)
    for each in fields(kind)
}
"""The type of each setting, by its name."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a stage."""

    overrides: list[str]
    """Hydra's arguments. The settings of the YAML file come before those of the command line, which win."""
    file: str | None = None
    """The YAML file, if one is given."""
    in_file: frozenset[str] = frozenset()
    """The names of the settings that the file gives."""

    def where(self, name: str) -> str:
        """Returns the beginning of a message about a setting: the file, if the file gives it."""
        is_in_file = any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in self.in_file)
        return f"{self.file}: " if is_in_file else ""


def mistake(error: Exception, arguments: Arguments) -> str:
    """Returns what is wrong with the arguments for which Hydra or OmegaConf raised `error`."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            return unknown_name(cause.full_key, arguments)
        name = cause.full_key.partition("[")[0]
        start = f"{arguments.where(name)}{name}: must be"
        if isinstance(cause, MissingMandatoryValue):
            return f"{start} set, but is left out; set {name}=VALUE"
        found = f"not ({str(cause).splitlines()[0]})"
        if isinstance(cause, ValidationError):
            found = "null" if cause.value is None else hide_passwords(str(cause.value))
        return f"{start} {words_of(TYPES.get(name))}, but is {found}; correct it"
    text = str(error).partition("\nSee https://hydra.cc")[0].partition("\nConfig search path:")[0]
    if isinstance(error, OverrideParseException):
        reason = one_line(text.removeprefix(f"Error parsing override '{error.override}'"))
        where = arguments.where(str(error.override).partition("=")[0])
        return f"{where}{hide_passwords(error.override)}: must be NAME=VALUE, but cannot be read ({reason})"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, chosen = error.missing_cfg_file.partition("/")
        otherwise = f"choose one of them, or set target.path={chosen}" if group == "target" else "choose one of them"
        return (
            f"{arguments.where(group)}{group}: must be one of {', '.join(error.options)}, but is {chosen}; "
            f"{advice(get_close_matches(chosen, error.options, n=1), otherwise)}"
        )
    if left_out := re.fullmatch(r"You must specify '(\w+)'.*Available options:(.*)", text, re.DOTALL):
        where = f"{arguments.file}: " if arguments.file else ""
        return (
            f"{where}{left_out[1]}: must be one of {', '.join(left_out[2].split())}, but is left out; "
            f"set {left_out[1]}=NAME, or let `mtptrain init TARGET` write a YAML file"
        )
    return one_line(text)


def words_of(kind: Any) -> str:
    """Returns what a value of this type is, for a message."""
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(map(words_of, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list in which each value is {words_of(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"one of {', '.join(kind)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null", str: "a text"}
    return words.get(kind, "names with values" if get_origin(kind) is dict or is_dataclass(kind) else "another value")


def unknown_name(name: str, arguments: Arguments) -> str:
    """Returns that no setting has this name, and the names that were probably meant.

    These are a very similar name, or else settings of the same name in other sections, or else the most similar name.
    """
    problem = f"{arguments.where(name)}{name}: must be the name of a setting, but no setting has this name; "
    if name in TYPES:
        heads = [head for head, kind in HEAD_CONFIGS.items() if name.removeprefix("head.") in kind.__dataclass_fields__]
        return f"{problem.replace('no setting', 'no setting of the chosen head')}only head={' or '.join(heads)} has it"
    for pattern, instead in REPLACED.items():
        if re.fullmatch(pattern, name):
            return problem + instead
    names, last = [*TYPES, *CONFIG_GROUPS], name.rpartition(".")[2]
    very_similar, similar = (get_close_matches(name, names, n=1, cutoff=cutoff) for cutoff in (0.9, 0.8))
    meant = very_similar or [each for each in names if each.rpartition(".")[2] == last][:2] or similar
    free = f" (+{name}=VALUE adds a new one)" if name.startswith(OPEN_SECTIONS) else ""
    return f"{problem}{advice(meant, '`--cfg job` shows all settings')}{free}"


def advice(names: Sequence[str], otherwise: str) -> str:
    return f"did you mean {' or '.join(names)}?" if names else otherwise
