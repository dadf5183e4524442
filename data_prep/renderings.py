"""Conversations -> the texts that become documents, by the target's own chat template, and where in them the answers stand.

A conversation of n turns is one text with n answers. An answer that the template shows otherwise once the conversation goes on
(reasoning stripped from the history, as Qwen3's does) has a text of its own: the prompt that it is generated from, and the answer.
That text takes along the earlier answers that stand in it as they were generated; going from the last answer backwards makes the
texts as few as can be.

A template with a `{% generation %}` block says itself what the assistant generates. With any other, what the template puts behind
the prompt for an answer is the answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from mtptrain.data.prompt_files import require_chat_template

from .conversations import ConversationRefused, Message

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendering:
    """A conversation, or the part of it up to one answer, as text."""

    text: str
    spans: list[Span]
    """Characters [start, end) that the assistant generates, in order."""
    answers: int
    """Whose spans these are."""
    turn: int = 0
    """0 for the first text of a conversation, else the number of its last message, from 1: an answer that is shown otherwise later."""
    answers_left_out: int = 0
    """Of the conversation, in its first text: answers that the template never shows behind the prompt for them."""


@dataclass(frozen=True)
class _Answer:
    """An answer as it is generated, behind its prompt."""

    turn: int
    """Number of the message, from 1."""
    text: str
    """The prompt, the answer, and what the template writes behind it."""
    spans: list[Span]


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Rendering]:
    """Render a conversation into as few texts as hold every answer once, as it is generated; the longest first.

    Raises:
        ConversationRefused: the template does not accept the messages, or no answer can be told from what surrounds it.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise ConversationRefused("no answer of the assistant")
    template = require_chat_template(tokenizer)
    try:
        whole, blocks, found = _render_all(tokenizer, messages)
        if "strftime_now" in template and _render(tokenizer, messages)[0] != whole:
            # Midnight came between two renderings, so that they differ by the date.
            whole, blocks, found = _render_all(tokenizer, messages)
    except TemplateError as error:
        raise ConversationRefused(f"the chat template answers: {error}") from error
    renderings = _cover(tokenizer, whole, [answer for answer in found if answer is not None and answer.spans])
    if _has_blocks(template) and [rendering.text for rendering in renderings] in ([], [whole]):
        return [Rendering(whole, blocks, len(found))]
    if not renderings:
        raise ConversationRefused("the chat template renders no answer as the continuation of its prompt")
    return [replace(renderings[0], turn=0, answers_left_out=found.count(None)), *renderings[1:]]


def _render_all(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, list[Span], list[_Answer | None]]:
    """The whole conversation as `_render` gives it, and every answer as it is generated."""
    text, blocks = _render(tokenizer, messages, return_assistant_tokens_mask=_has_blocks(require_chat_template(tokenizer)))
    turns = [turn for turn, message in enumerate(messages, 1) if message["role"] == "assistant"]
    return text, blocks, [_generated_answer(tokenizer, messages[:turn]) for turn in turns]


def _has_blocks(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _generated_answer(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> _Answer | None:
    """The last message as it is generated, None if the template does not show it behind a prompt."""
    has_blocks = _has_blocks(require_chat_template(tokenizer))
    try:
        prompt, _ = _render(tokenizer, messages[:-1], add_generation_prompt=True)
        text, blocks = _render(tokenizer, messages, return_assistant_tokens_mask=has_blocks)
        start = _answer_start(tokenizer, messages, prompt, text)
    except TemplateError:  # no prompt in front of an answer without a question, say
        return None
    if start is None or start == len(text):
        return None
    shift = len(prompt) - start
    spans = [(begin + shift, end + shift) for begin, end in (blocks if has_blocks else [(start, len(text))]) if end > start]
    return _Answer(len(messages), prompt + text[start:], spans)


def _answer_start(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: str, text: str) -> int | None:
    """Where in `text`, up to the last message, that message begins; None if that cannot be told."""
    if text.startswith(prompt):
        return len(prompt)
    # The template shows the history otherwise once there is an answer to it: look for what makes a prompt of a history.
    history, _ = _render(tokenizer, messages[:-1])
    cue = prompt.removeprefix(history)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    is_sure = prompt.startswith(history) and cue and text.count(cue) == num_answers
    return text.rindex(cue) + len(cue) if is_sure else None


def _cover(tokenizer: PreTrainedTokenizerBase, whole: str, answers: Sequence[_Answer]) -> list[Rendering]:
    """Texts in which every answer stands once as it is generated: the whole one if the last answer stands in it, then that of the
    last answer still missing, and so on.
    """
    renderings: list[Rendering] = []
    missing = list(answers)
    while missing:
        last = missing[-1]
        text = whole if not renderings and _spans_in(tokenizer, whole, last) else last.text
        standing = _standing(tokenizer, text, missing)
        spans = [span for turn in sorted(standing) for span in standing[turn]]
        renderings.append(Rendering(text, spans, len(standing), last.turn))
        missing = [answer for answer in missing if answer.turn not in standing]
    return renderings


def _standing(tokenizer: PreTrainedTokenizerBase, text: str, answers: Sequence[_Answer]) -> dict[int, list[Span]]:
    """By turn, the spans of the answers that stand in `text`; of two that touch, the later: they would read as one."""
    standing: dict[int, list[Span]] = {}
    next_start = len(text) + 1
    for answer in reversed(answers):
        spans = _spans_in(tokenizer, text, answer)
        if spans and spans[-1][1] < next_start:
            standing[answer.turn] = spans
            next_start = spans[0][0]
    return standing


def _spans_in(tokenizer: PreTrainedTokenizerBase, text: str, answer: _Answer) -> list[Span]:
    """None where `text` shows the answer, or anything before it, otherwise than when it is generated."""
    if text.startswith(answer.text):
        return answer.spans
    end = _end_without_closing(tokenizer, answer.text)
    if end is None or not text.startswith(answer.text[:end]):
        return []
    return [(start, min(stop, end)) for start, stop in answer.spans if start < end]


def _end_without_closing(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Where the last turn ends, if the template closes a conversation with an end-of-text token behind it, as Phi-3's does."""
    eos = tokenizer.eos_token
    if not isinstance(eos, str) or not text.endswith(eos):
        return None
    turns = text.removesuffix(eos)
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return len(turns) if turns.rstrip().endswith(special) else None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **settings: bool) -> tuple[str, list[Span]]:
    """Text and, if asked for, the characters of its generation blocks."""
    # Not apply_chat_template: it refuses the empty list in front of an answer without a question, and its mask loses the last
    # bytes of a span that ends inside a character of several tokens.
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **settings}
    rendered: Any = render_jinja_template(conversations=[list(messages)], chat_template=tokenizer.get_chat_template(), **variables)
    texts, spans = rendered
    return texts[0], spans[0] if spans else []
