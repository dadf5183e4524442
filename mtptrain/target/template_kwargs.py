"""Sets variables of a target's chat template, such as `enable_thinking`, which servers call `chat_template_kwargs`."""

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, meta
from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from mtptrain.utils.errors import UserError, error_summary

RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of a template that differ from one rendering to the next."""

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tags, which Jinja does not know."""


def set_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Sets variables of a tokenizer's chat template for all that is rendered from now on.

    The values become the beginning of the template itself, so no rendering can miss them and its hash shows them.
    """
    if not kwargs:
        return
    given: str | dict[str, str] = tokenizer.chat_template or ""
    templates = given if isinstance(given, dict) else {"": given}
    try:
        read = set().union(*map(_names_in, templates.values())) - set(RENDERED)
    except TemplateSyntaxError as error:
        raise UserError(
            f"target.path: the chat template of {tokenizer.name_or_path} must be valid, but Jinja reports "
            f"{error_summary(error)}; correct it"
        ) from error
    if wrong := [name for name in kwargs if name not in read]:
        raise UserError(
            f"prompts.template_kwargs: must name variables that the chat template of {tokenizer.name_or_path} reads, "
            f"except {', '.join(RENDERED)}, but names {', '.join(wrong)}; correct or remove it"
        )
    # A plus sign keeps the line break after a block, with which a template may begin.
    settings = "".join(f"{{%+ set {name} = {value!r} +%}}" for name, value in kwargs.items())
    extended = {name: settings + template for name, template in templates.items()}
    tokenizer.chat_template = extended if isinstance(given, dict) else extended[""]


def _names_in(template: str) -> set[str]:
    """Returns the variables that a template reads before it sets them."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template)))
