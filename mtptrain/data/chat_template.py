"""Calls the target's chat template, a program that comes with the target: it may raise any error, or never end."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

LIMIT_S = 10.0
"""Seconds of processor time that a template may take to render a conversation; real ones take milliseconds."""


class EndlessTemplate(RuntimeError):
    """Raised when a chat template has not rendered a conversation within `LIMIT_S`."""


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the chat template of a tokenizer.

    Raises:
        ValueError: it has none.
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
        TemplateError: the template rejects them, or fails.
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
        messages: `{"role": ..., "content": ...}` each; the last is not an assistant message.
        where: file and line of the messages, for the error.

    Raises:
        ValueError: the tokenizer has no chat template, or the template rejects the messages.
        EndlessTemplate: the template takes too long.
    """
    require_chat_template(tokenizer)
    try:
        text = render_text(tokenizer, messages, is_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"{where}: must be accepted by the chat template of {tokenizer.name_or_path}, but it reports: "
            f"{' '.join(str(error).split())}; correct them, or the template"
        ) from error
    except EndlessTemplate as error:
        raise EndlessTemplate(f"{where}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Limits the time of a rendering, and turns every error that a template can raise into jinja2's TemplateError.

    Only the main thread has the limit, because only it gets signals. Every program renders there first.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        EndlessTemplate: the template takes too long.
    """

    def stop(*_: object) -> None:
        raise EndlessTemplate(
            f"the chat template of {tokenizer.name_or_path} must render a conversation within {LIMIT_S:g} s, but is "
            f"not done with one of {len(messages)} messages ({_beginning(messages)}); correct the template in the "
            "target's directory, or choose another target"
        )

    is_limited = threading.current_thread() is threading.main_thread()
    if is_limited:
        # A timer of processor time, which does not run while other programs have the processor.
        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    except (TemplateError, EndlessTemplate):
        raise
    except Exception as error:  # the template is a program that we do not know, so it may raise anything
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
    finally:
        if is_limited:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


def _beginning(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the beginning of the first message, by which a reader can find the conversation."""
    return f"{messages[0].get('role')}: {str(messages[0].get('content'))[:40]!r}" if messages else "none"
