"""Renders messages with the target's chat template, a program that may raise any error, or never end."""

import ctypes
import functools
import itertools
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateRuntimeError
from transformers import PreTrainedTokenizerBase

from mtptrain.utils.errors import UserError

LIMIT_S = 10.0
"""CPU seconds that a template may take to render a conversation. Real templates take milliseconds."""
LIMIT_BYTES = 2**30
"""Memory in bytes that a template may take to render a conversation."""
MAX_CHARACTERS = 2**24
"""Maximum length of a rendered conversation. The longest contexts have a few million characters."""


class EndlessTemplate(UserError):
    """Raised when a chat template has not rendered a conversation within `LIMIT_S`."""


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


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], is_prompt: bool = False
) -> str:
    """Renders messages with the chat template, followed by the generation prompt if `is_prompt`.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        EndlessTemplate: the template takes too long.
    """
    with rendering(tokenizer, messages):
        read, tools = without_tools(messages)
        rendered = tokenizer.apply_chat_template(read, tools=tools, add_generation_prompt=is_prompt, tokenize=False)
        assert isinstance(rendered, str)
        check_rendered(rendered)
    return rendered


def without_tools(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Returns the messages as templates read them, and the tools, which stand in the first message."""
    first = dict(messages[0]) if messages else {}
    tools = first.pop("tools", None)
    return [first, *map(dict, messages[1:])] if messages else [], tools


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> list[int]:
    """Returns the token ids of `prompt_text`, whose arguments and errors it has."""
    return tokenize_rendered(tokenizer, prompt_text(tokenizer, messages, where))


def tokenize_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a rendered text, which already holds all special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


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
        EndlessTemplate: the template takes too long.
    """
    require_chat_template(tokenizer)
    try:
        return render_text(tokenizer, messages, is_prompt=True)
    except TemplateError as error:
        raise UserError(
            f"{where}: the messages must be accepted by the chat template of {tokenizer.name_or_path}, but the "
            f"template reports: {' '.join(str(error).split())}; correct the messages or the template"
        ) from error
    except EndlessTemplate as error:
        raise EndlessTemplate(f"{where}: {error}") from error


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Limits the CPU time and memory of rendering, and converts every error of a template to jinja2's TemplateError.

    Raises:
        TemplateError: the template rejects the messages, or fails.
        EndlessTemplate: the template takes too long.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _limited_memory(), _limited_by_signal() if is_main else _limited_by_watcher():
            given = tokenizer.chat_template
            for template in given.values() if isinstance(given, dict) else (given or "",):
                refuse_powers(template)
            yield
    except TemplateError:
        raise
    except EndlessTemplate as error:
        raise EndlessTemplate(
            f"the chat template of {tokenizer.name_or_path} must render a conversation within {LIMIT_S:g} s of CPU "
            f"time, but has not finished the one that begins with {_beginning(messages)} (messages: {len(messages)}); "
            "correct the template in the target's directory, or choose another target"
        ) from error
    except MemoryError as error:
        raise TemplateRuntimeError(f"it must render within {LIMIT_BYTES / 2**30:g} GiB of memory") from error
    except Exception as error:  # a template is an unknown program, so it may raise anything
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


def check_rendered(text: str) -> None:
    """Raises an error if a rendered text is too long for the tokenizer, or has a lone surrogate, which it rejects."""
    if len(text) > MAX_CHARACTERS:
        raise TemplateRuntimeError(f"it must render at most {MAX_CHARACTERS:,} characters, but renders {len(text):,}")
    text.encode()


_IS_LINUX = sys.platform == "linux"
_one_limit = threading.Lock()


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Raises MemoryError if the process takes `LIMIT_BYTES` more of memory than it has now. Only Linux can tell.

    The limit is that of the whole process, so only one thread at a time may render.
    """
    if not _IS_LINUX:
        yield
        return
    with _one_limit:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            num_pages = int(file.read().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = num_pages * resource.getpagesize() + LIMIT_BYTES
        known = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _limited_by_signal() -> Iterator[None]:
    """Raises EndlessTemplate in the main thread, the only one that gets signals."""

    def stop(*_: object) -> None:
        raise EndlessTemplate

    # This timer counts the process's own CPU time, so that other programs cannot use up the limit.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@contextmanager
def _limited_by_watcher() -> Iterator[None]:
    """Raises EndlessTemplate in this thread from another one, which watches this thread's CPU time."""
    renderer = threading.get_ident()
    clock = time.pthread_getcpuclockid(renderer)
    end_s = time.clock_gettime(clock) + LIMIT_S
    has_ended, deciding = threading.Event(), threading.Lock()

    def watch() -> None:
        remaining_s = LIMIT_S
        while not has_ended.wait(remaining_s):
            with deciding:  # while this holds the lock, the renderer cannot end, so its clock exists
                remaining_s = 0.0 if has_ended.is_set() else end_s - time.clock_gettime(clock)
                if not has_ended.is_set() and remaining_s <= 0.0:
                    _raise_in(renderer, EndlessTemplate)
                    return
            remaining_s = max(remaining_s, 0.01)

    watcher = threading.Thread(target=watch, name="template limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with deciding:
            has_ended.set()
        _raise_in(renderer, None)  # an exception that is still pending would be raised after the rendering


def _raise_in(thread_id: int, error: type[Exception] | None) -> None:
    """Raises an exception in a thread before its next step in Python; None takes a pending one back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), None if error is None else ctypes.py_object(error)
    )


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
