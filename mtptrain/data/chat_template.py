"""Renders messages with the target's chat template, in transformers' sandbox."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError, TemplateRuntimeError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from mtptrain.data.conversation import SYSTEM_ROLES, ConversationRefused, Message
from mtptrain.target.files import DEVELOPER
from mtptrain.utils.errors import UserError

SCATTERED = (
    "it does not know the role developer, so that vLLM joins all such messages, and those of the role system, at the "
    "beginning, and llama.cpp leaves them in place; if you send them as system, set +prompts.roles.developer=system"
)
LEFT_OUT = "x-anthropic-billing-header"
"""How a line of a system prompt begins that vLLM 0.32 leaves out (vllm/renderers/chat_utils.py)."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the special tokens of a tokenizer by id, those of the template and the ends of a text among them."""
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def require_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the chat template of a tokenizer: of several, the one for conversations with or without tools."""
    given = tokenizer.chat_template
    if not given or (isinstance(given, dict) and "default" not in given):
        has = f"only {', '.join(sorted(given))}, no default" if given else "none" if given is None else "an empty one"
        raise UserError(
            "target.path: the tokenizer must have a chat template to render messages, but that of "
            f"{tokenizer.name_or_path} has {has}; choose an instruction-tuned target, put one into chat_template.jinja "
            "of its directory, or use plain text"
        )
    return tokenizer.get_chat_template(tools=_tools_of(messages))


def _tools_of(messages: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    return messages[0].get("tools") if messages else None


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], is_prompt: bool = False
) -> str:
    """Returns the text of messages, followed by the generation prompt if `is_prompt`, or raises TemplateError."""
    # apply_chat_template rejects an empty list of messages, the history of an assistant turn that comes first.
    try:
        read = [{key: value for key, value in each.items() if key not in ("tools", "weight")} for each in messages]
        tools = _tools_of(messages)
        template = tokenizer.get_chat_template(tools=tools)
        if "developer" in {each["role"] for each in read} and not DEVELOPER.search(template):
            if any(each["role"] in SYSTEM_ROLES for each in read[1:]):
                raise TemplateRuntimeError(SCATTERED)
            read[0] |= {"role": "system"}
        if any(each["role"] == "system" and each["content"].startswith(LEFT_OUT) for each in read):
            raise TemplateRuntimeError(f"vLLM leaves out the line of {LEFT_OUT} in a system prompt; remove it")
        variables: dict[str, Any] = tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            conversations=[read],
            tools=tools,
            chat_template=template,
            add_generation_prompt=is_prompt,
            **variables,
        )
        text = str(rendered[0][0])
        text.encode()  # the tokenizer rejects lone surrogates
    except TemplateSyntaxError as error:
        raise UserError(
            f"{tokenizer.name_or_path}: the chat template, of chat_template.jinja or tokenizer_config.json, must be "
            f"valid, but Jinja reports in line {error.lineno}: {error}; correct it, or download it again"
        ) from error
    except TemplateError:
        raise
    except Exception as error:  # a template is an unknown program, so it may raise anything
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    return text


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> str:
    """Returns a conversation followed by the generation prompt. An error names `where` the messages come from."""
    require_chat_template(tokenizer)
    try:
        return render_text(tokenizer, messages, is_prompt=True)
    except TemplateError as error:
        raise UserError(
            f"{where}: the messages must be accepted by the chat template of {tokenizer.name_or_path}, but the "
            f"template reports: {' '.join(str(error).split())}; correct the messages or the template"
        ) from error


INCOMPLETE = "\ufffd"
"""The character to which tokenizers decode a byte of an incomplete character."""


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    # Cleaning up would remove the space before a full stop.
    return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def tokenize_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a rendered text, which already holds all special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> list[int]:
    """Returns the token ids of `prompt_text`, whose arguments and errors it has."""
    return tokenize_rendered(tokenizer, prompt_text(tokenizer, messages, where))


def refuse_dropped_prompts(whole: str, messages: Sequence[Message]) -> None:
    """Raises ConversationRefused if the whole rendered text leaves out a tool, or a text that is not an answer.

    White space may differ, and a tool's result may be written as a JSON string.
    """
    rendered = _squeeze(whole)
    for message in messages:
        forms = [message["content"], json.dumps(message["content"], ensure_ascii=False)[1:-1]]
        if message["role"] != "assistant" and not any(_squeeze(form) in rendered for form in forms):
            raise ConversationRefused(f"a {message['role']} message that the chat template does not render")
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
    for tool in messages[0].get("tools", []):
        name = tool["function"]["name"]
        if rendered.count(_squeeze(name)) <= called.count(name):
            raise ConversationRefused("tools that the chat template does not render")


def _squeeze(text: str) -> str:
    return "".join(text.split())
