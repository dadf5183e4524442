"""Renders messages with the target's chat template, in transformers' sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from mtptrain.utils.errors import UserError

Span = tuple[int, int]
"""Characters [start, end) of a text."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the special tokens of a tokenizer by id, those of the template and the ends of a text among them."""
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def require_chat_template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None = None) -> str:
    """Returns the chat template of a tokenizer: of several, the one for conversations with or without these tools.

    Raises:
        UserError: the tokenizer has none, or none of several is the default.
    """
    given = tokenizer.chat_template
    if not given or (isinstance(given, dict) and "default" not in given):
        has = f"only {', '.join(sorted(given))}, no default" if given else "none"
        raise UserError(
            "target.path: the tokenizer must have a chat template to render messages, but that of "
            f"{tokenizer.name_or_path} has {has}; choose an instruction-tuned target, add chat_template.jinja to its "
            "directory, or use plain text"
        )
    return tokenizer.get_chat_template(tools=tools)


def without_tools(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Returns the messages as templates read them, and the tools, which stand in the first message."""
    first = dict(messages[0]) if messages else {}
    tools = first.pop("tools", None)
    return [first, *map(dict, messages[1:])] if messages else [], tools


def render_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    is_prompt: bool = False,
    has_blocks: bool = False,
) -> tuple[str, list[Span]]:
    """Returns the text of messages and, if the template has them, the spans of its generation blocks.

    Raises:
        TemplateError: the template rejects the messages, or fails.
    """
    # apply_chat_template rejects an empty list of messages, the history of an assistant turn that comes first. Its mask
    # omits the last tokens of a block whose last character takes several.
    try:
        read, tools = without_tools(messages)
        template = tokenizer.get_chat_template(tools=tools)
        variables: dict[str, Any] = tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            conversations=[read],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=has_blocks,
            add_generation_prompt=is_prompt,
            **variables,
        )
        [text], spans = rendered
        text.encode()  # the tokenizer rejects lone surrogates
    except TemplateError:
        raise
    except Exception as error:  # a template is an unknown program, so it may raise anything
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    return text, spans[0] if spans else []


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], is_prompt: bool = False
) -> str:
    """Returns the text of messages, followed by the generation prompt if `is_prompt`.

    Raises:
        TemplateError: the template rejects the messages, or fails.
    """
    return render_spans(tokenizer, messages, is_prompt)[0]


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> str:
    """Returns a conversation as text, followed by the generation prompt.

    Args:
        tokenizer: the target's tokenizer.
        messages: dicts with `role` and `content`; the last one is not an assistant message.
        where: where the messages come from, such as a file and line, for error messages.

    Raises:
        UserError: the tokenizer has no chat template, or the template rejects the messages.
    """
    require_chat_template(tokenizer)
    try:
        return render_text(tokenizer, messages, is_prompt=True)
    except TemplateError as error:
        raise UserError(
            f"{where}: the messages must be accepted by the chat template of {tokenizer.name_or_path}, but the "
            f"template reports: {' '.join(str(error).split())}; correct the messages or the template"
        ) from error


def tokenize_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a rendered text, which already holds all special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> list[int]:
    """Returns the token ids of `prompt_text`, whose arguments and errors it has."""
    return tokenize_rendered(tokenizer, prompt_text(tokenizer, messages, where))
