"""Renders messages with the target's chat template, a program that may raise any error, or never end."""

import functools
import itertools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

LIMIT_S = 10.0
"""CPU seconds that a template may take to render a conversation. Real templates take milliseconds."""


class EndlessTemplate(RuntimeError):
    """Raised when a chat template has not rendered a conversation within `LIMIT_S`."""


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the chat template of a tokenizer.

    Raises:
        ValueError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "target.path: the tokenizer must have a chat template to render messages, but that of "
            f"{tokenizer.name_or_path} has none; choose an instruction-tuned target, add chat_template.jinja to its "
            "directory, or use plain text"
        )
    template: str = tokenizer.get_chat_template()
    return template


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], is_prompt: bool = False
) -> str:
    """Renders messages with the chat template, followed by the generation prompt if `is_prompt`.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        EndlessTemplate: the template takes too long.
    """
    with rendering(tokenizer, messages):
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=is_prompt, tokenize=False
        )
    assert isinstance(rendered, str)
    return rendered


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> list[int]:
    """Returns the token ids of a conversation followed by the generation prompt.

    Args:
        tokenizer: the target's tokenizer.
        messages: dicts with `role` and `content`; the last one is not an assistant message.
        where: where the messages come from, such as a file and line, for error messages.

    Raises:
        ValueError: the tokenizer has no chat template, or the template rejects the messages.
        EndlessTemplate: the template takes too long.
    """
    require_chat_template(tokenizer)
    try:
        text = render_text(tokenizer, messages, is_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"{where}: the messages must be accepted by the chat template of {tokenizer.name_or_path}, but the "
            f"template reports: {' '.join(str(error).split())}; correct the messages or the template"
        ) from error
    except EndlessTemplate as error:
        raise EndlessTemplate(f"{where}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Limits the CPU time of rendering, and converts every error of a template to jinja2's TemplateError.

    The limit applies only in the main thread, because other threads get no signals. Every program first renders a
    conversation in the main thread, so a template that never ends, whatever the conversation, is found there.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        EndlessTemplate: the template takes too long.
    """

    def stop(*_: object) -> None:
        raise EndlessTemplate(
            f"the chat template of {tokenizer.name_or_path} must render a conversation within {LIMIT_S:g} s of CPU "
            f"time, but has not finished the one that begins with {_beginning(messages)} (messages: {len(messages)}); "
            "correct the template in the target's directory, or choose another target"
        )

    is_limited = threading.current_thread() is threading.main_thread()
    if is_limited:
        # This timer counts the process's own CPU time, so that other programs cannot use up the limit.
        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        refuse_powers(tokenizer.get_chat_template())
        yield
    except (TemplateError, EndlessTemplate):
        raise
    except Exception as error:  # a template is an unknown program, so it may raise anything
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    finally:
        if is_limited:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@functools.cache
def refuse_powers(template: str) -> None:
    """Raises TemplateError if a template computes a power.

    Python computes a power such as `9 ** 9 ** 9` in one step, which neither the limit of `rendering` nor Ctrl-C can
    interrupt. After a comma or an opening parenthesis, `**` passes keyword arguments instead.
    """
    tokens = [(kind, value) for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    if any(
        token == ("operator", "**") and before not in (",", "(") for (_, before), token in itertools.pairwise(tokens)
    ):
        raise TemplateRuntimeError("it must not compute powers (**), because they cannot be interrupted")


def _beginning(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the beginning of the first message, so that a reader can find the conversation."""
    return f"{messages[0].get('role')}: {str(messages[0].get('content'))[:40]!r}" if messages else "nothing"
