"""A target on disk: where it is, and its config, tokenizer and fingerprint for whoever holds it."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, meta
from jinja2.nodes import Template
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from mtptrain.target.families import read_target_config
from mtptrain.target.generation import GenerationDefaults, parse_generation, read_generation
from mtptrain.target.gguf import gguf_of, is_gguf, read_header, sampling_of
from mtptrain.target.hub import DEMO, TOKENIZER_FILES, load_tokenizer, weights_fingerprint
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import read_json

RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of a template that differ from one rendering to the next."""

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tags, which Jinja does not know."""
DEVELOPER = re.compile(r"""(['"])developer\1""")
"""Is in templates that know this role. For others, vLLM 0.32 and llama.cpp b11434 make it the role `system`."""


def override_of(mode: str) -> str:
    """Returns what sets a mode (`TargetFiles.template_kwargs_json`) on the command line."""
    settings = [f"+prompts.template_kwargs.{name}={json.dumps(value)}" for name, value in json.loads(mode).items()]
    return shlex.join(settings) or "no prompts.template_kwargs"


@dataclass(frozen=True)
class TargetFiles:
    """A target's directory, and what is read from it when it is first needed."""

    directory: Path
    path: str = ""
    """The setting that chose the target: `demo`, a directory, a GGUF file or a hub name; empty for a directory."""
    revision: str | None = None
    """Revision of the hub repository."""
    given_gguf: str | None = None
    """The setting `target.gguf`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as `prompts.template_kwargs` sets them."""

    @property
    def name_for_engines(self) -> str:
        """The name or path by which a serving engine loads the target. A name would stand for the default revision."""
        has_name = self.path not in ("", DEMO) and not is_gguf(self.path) and self.revision is None
        return self.path if has_name else str(self.directory)

    @property
    def gguf(self) -> Path | None:
        return gguf_of(self.path, self.given_gguf)

    @property
    def template_kwargs_json(self) -> str:
        """JSON of the `template_kwargs`, which say in which mode the chat template is used."""
        return json.dumps(dict(self.template_kwargs), sort_keys=True)

    @cached_property
    def config(self) -> PreTrainedConfig:
        return read_target_config(self.directory)

    @property
    def classes(self) -> tuple[str, list[str]]:
        """The first of `architectures` in config.json, "" without one, and transformers' own for its model_type."""
        config = read_json(self.directory / "config.json")
        tables = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        own = [names[config["model_type"]] for names in tables if config["model_type"] in names]
        return next(iter(config.get("architectures") or []), ""), own

    @property
    def has_image_encoder(self) -> bool:
        """Whether the checkpoint holds an image+text model, of which the target is the language model."""
        return not {"text_config", "vision_config"}.isdisjoint(read_json(self.directory / "config.json"))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read by `load_tokenizer`, with the `template_kwargs` in its chat template."""
        tokenizer = load_tokenizer(self.directory)
        set_template_kwargs(tokenizer, self.template_kwargs)
        return tokenizer

    @cached_property
    def own_generation(self) -> GenerationDefaults:
        """What generation_config.json asks of whoever generates with the target."""
        return read_generation(self.directory, self.config)

    @cached_property
    def generation(self) -> GenerationDefaults:
        """What the target's files ask of whoever generates with it, with the tokenizer's end among the ends."""
        found = self.own_generation
        if not any((self.directory / name).is_file() for name in TOKENIZER_FILES):
            return found
        end = self.tokenizer.eos_token_id
        return found.ending_at(end if end is not None and end < self.config.vocab_size else None)

    @property
    def gguf_metadata(self) -> Mapping[str, Any]:
        """The metadata of the target's GGUF file; nothing without one."""
        return read_header(self.gguf).metadata if self.gguf is not None and self.gguf.is_file() else {}

    @cached_property
    def gguf_generation(self) -> GenerationDefaults:
        """What the target's GGUF file asks of whoever generates with it; nothing without one."""
        if self.gguf is None or not self.gguf.is_file():
            return GenerationDefaults()
        return parse_generation(sampling_of(read_header(self.gguf)), self.gguf, self.config)

    @cached_property
    def weights_sha256(self) -> str:
        return weights_fingerprint(self.directory)


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Sets variables of a tokenizer's chat template for all that is rendered from now on.

    The values become the beginning of the template itself, so no rendering can miss them and its hash shows them.
    """
    if not kwargs:
        return
    given: str | dict[str, str] = tokenizer.chat_template or ""
    templates = given if isinstance(given, dict) else {"": given}
    with refusing(f"target.path: the chat template of {tokenizer.name_or_path} must be valid", "correct it", "Jinja"):
        read = set().union(*map(names_in, templates.values())) - set(RENDERED)
    if wrong := [name for name in kwargs if name not in read]:
        raise UserError(
            f"prompts.template_kwargs: must name variables that the chat template of {tokenizer.name_or_path} reads, "
            f"except {', '.join(RENDERED)}, but names {', '.join(wrong)}; correct or remove it"
        )
    # A plus sign keeps the line break after a block, with which a template may begin.
    settings = "".join(f"{{%+ set {name} = {value!r} +%}}" for name, value in kwargs.items())
    extended = {name: settings + template for name, template in templates.items()}
    tokenizer.chat_template = extended if isinstance(given, dict) else extended[""]


def names_in(template: str) -> set[str]:
    """Returns the variables that a template reads before it sets them."""
    return meta.find_undeclared_variables(parsed_template(template))


def parsed_template(template: str) -> Template:
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", template))
