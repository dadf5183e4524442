"""Renders conversations with the target's chat template, and marks the text that the assistant generates.

A conversation with n assistant turns is usually one text with n spans. But some templates render a turn differently
once the conversation continues; Qwen3's, for instance, strips reasoning from the history. Such a turn gets an
additional text: its prompt and the turn as generated. In this text, earlier turns that appear as generated are
supervised too, unless another text already supervises them. Working backwards from the last turn gives the smallest
number of texts.

An assistant turn is what the template renders after the turn's prompt, except an empty think block before an answer
without reasoning, which a server's prompt holds where the target does not think. If the template has
`{% generation %}` blocks, only their text in it is supervised. A turn that is not rendered after its prompt is never
supervised, since no server asks for it that way.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import (
    Span,
    render_spans,
    render_text,
    require_chat_template,
    special_tokens,
    without_tools,
)
from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.rows import NOT_TRAINED, refuse_dropped_prompts
from mtptrain.data.tool_calls import Message, call_words
from mtptrain.utils.masking import printable

NO_ANSWER = "no assistant turn"
"""Reason for refusing a conversation without an assistant turn."""
OPEN, CLOSE = "<think>", "</think>"
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_BLOCK = re.compile(rf"\s*({OPEN})?\s*{CLOSE}\s*")
"""An empty think block, which the prompt may begin."""


@dataclass(frozen=True)
class Rendering:
    """A conversation, or its beginning up to one assistant turn, as text."""

    text: str
    spans: list[Span]
    """Characters [start, end) that the assistant generates, ascending."""
    answers: int
    """Number of assistant turns that the spans belong to."""
    turn: int = 0
    """0 for the first text of a conversation; otherwise the number of the text's last message, counted from 1."""
    answers_left_out: int = 0
    """Number of assistant turns left out, because the template does not render them after their prompt, or its
    generation block has none of their text; set only in the first text."""
    answers_untrained: int = 0
    """Number of assistant turns that are not to be trained; set only in the first text."""
    answers_inserted: int = 0
    """Number of assistant turns that begin or end with text of the template, such as an empty think block; set only in
    the first text."""


@dataclass(frozen=True)
class _Turn:
    """An assistant turn as generated, after its prompt."""

    number: int
    """Number of the message, from 1."""
    text: str
    """The prompt, the response, and the text that the template adds after it."""
    spans: list[Span]
    start: int
    """Length of the prompt."""


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], is_generated: bool = False
) -> list[Rendering]:
    """Render a conversation into the fewest texts in which every assistant turn is supervised once, as generated.

    The first text contains the last assistant turn that can be located and is to be trained.

    Args:
        tokenizer: the target's tokenizer.
        messages: the conversation.
        is_generated: whether the target generated the answers, which need no check then.

    Raises:
        ConversationRefused: there is no assistant turn to train, one is empty, holds a special token or is rendered
            otherwise than written, the template drops a prompt, rejects the messages or fails, or no assistant turn can
            be located in the text.
        UserError: the tokenizer has no chat template.
    """
    special = set(special_tokens(tokenizer).values())
    trained = _trained_answers(messages, () if is_generated else special)
    num_untrained = sum(message.items() >= NOT_TRAINED.items() for message in messages)
    messages = [{key: value for key, value in message.items() if key not in NOT_TRAINED} for message in messages]
    _, tools = without_tools(messages)
    template = require_chat_template(tokenizer, tools)
    try:
        whole, turns = _render_all(tokenizer, messages)
        if "strftime_now" in template and render_text(tokenizer, messages) != whole:
            whole, turns = _render_all(tokenizer, messages)  # the date changed between two renderings
    except TemplateError as error:
        reason = printable(str(error)) or "it gives no reason"
        raise ConversationRefused(f"the chat template fails: {reason}") from error
    refuse_dropped_prompts(whole, messages)
    located = [turn for turn in turns if turn is not None and turn.number in trained]
    for turn in located:
        if not is_generated:
            _refuse_rewritten(turn, trained[turn.number])
    supervised = located if is_generated else [_without_empty_block(turn, trained[turn.number]) for turn in located]
    renderings = _cover(whole, [turn for turn in supervised if turn.spans])
    if not renderings and located:
        raise ConversationRefused("the chat template's {% generation %} block contains no text of an assistant message")
    if not renderings:
        raise ConversationRefused("the chat template renders no answer as the continuation of its prompt")
    inserted = 0 if is_generated else sum(_has_inserted_text(turn, trained[turn.number], special) for turn in located)
    left_out = len(trained) - sum(rendering.answers for rendering in renderings)
    first = replace(
        renderings[0], answers_left_out=left_out, answers_untrained=num_untrained, answers_inserted=inserted
    )
    return [first, *renderings[1:]]


def _trained_answers(messages: Sequence[Message], forbidden: Collection[str]) -> dict[int, Message]:
    """Returns the assistant turns that are to be trained, by number from 1, if there are any and all have text.

    Args:
        messages: the conversation.
        forbidden: special tokens, which no answer may hold, because the target does not generate them within one.
    """
    answers = {number: message for number, message in enumerate(messages, 1) if message["role"] == "assistant"}
    trained = {number: message for number, message in answers.items() if not message.items() >= NOT_TRAINED.items()}
    if not trained:
        raise ConversationRefused("no assistant turn that is to be trained" if answers else NO_ANSWER)
    parts = {"reasoning_content", "tool_calls"}
    if not all(message["content"].strip() or parts & message.keys() for message in trained.values()):
        raise ConversationRefused("an answer without text")
    texts = []
    for message in trained.values():
        calls = json.dumps(message.get("tool_calls", ""), ensure_ascii=False)
        texts += [message.get("reasoning_content", ""), message["content"], calls]
    for token in sorted(set(forbidden)):
        if any(token in text for text in texts):
            raise ConversationRefused(f"an answer with the special token {token} in its text")
    if any(tag in message.get("reasoning_content", "") for message in trained.values() for tag in (OPEN, CLOSE)):
        raise ConversationRefused(f"reasoning with {OPEN} or {CLOSE} in its text")
    return trained


def _refuse_rewritten(turn: _Turn, message: Message) -> None:
    """Raises ConversationRefused if a text of the message is missing in its rendering, or has other think tags there.

    White space may differ at the beginning and end of a text.
    """
    prompt, generated = turn.text[: turn.start].rstrip(), turn.text[turn.start :]
    content, reasoning = message["content"], message.get("reasoning_content", "")
    texts = _texts_of(message)
    if _place_of(texts, generated) is None:
        is_content_there = _place_of(texts[1:], generated) is not None
        raise ConversationRefused(
            "reasoning that the chat template does not render"
            if is_content_there
            else "an answer that the chat template does not render as it is written"
        )
    if any(word not in generated for call in message.get("tool_calls", []) for word in call_words(call)):
        raise ConversationRefused("a tool call that the chat template does not render")
    # A think tag stands in the message, or the template adds it, in the prompt or in the answer. `opened` counts the
    # tags of both; a prompt that ends with `</think>` has opened a block too.
    begins = bool(reasoning) or content.lstrip().startswith(OPEN)
    opened = prompt.endswith((OPEN, CLOSE)) + generated.count(OPEN)
    if begins and opened > content.count(OPEN) + bool(reasoning):  # both wrote one
        raise ConversationRefused("an answer with the think tags of both the message and the chat template")
    if opened < content.count(OPEN) or generated.count(CLOSE) < content.count(CLOSE):  # the template drops one
        raise ConversationRefused("an answer whose think tags the chat template does not render")
    is_open = prompt.endswith(OPEN) or OPEN in generated.partition(CLOSE)[0]
    if CLOSE in content.partition(OPEN)[0] and not is_open:  # it closes a block that nobody opened
        raise ConversationRefused(f"an answer with {CLOSE} but no {OPEN}")
    if (prompt.endswith(OPEN) or content.lstrip().startswith(OPEN)) and CLOSE not in generated:  # it never closes
        raise ConversationRefused(f"an answer with {OPEN} but no {CLOSE}")


def _texts_of(message: Message) -> list[str]:
    """Returns the reasoning of an answer and the parts of its content between think tags."""
    return [message.get("reasoning_content", ""), *re.split(f"{OPEN}|{CLOSE}", message["content"])]


def _place_of(texts: Sequence[str], generated: str) -> Span | None:
    """Returns where the first of these texts begins and the last one ends, or None if one is missing after another."""
    starts, end = [], 0
    for text in filter(None, map(str.strip, texts)):
        start = generated.find(text, end)
        if start < 0:
            return None
        starts.append(start)
        end = start + len(text)
    return (starts[0], end) if starts else (0, 0)


def _without_empty_block(turn: _Turn, message: Message) -> _Turn:
    """Returns the turn without the empty think block that a template puts before an answer without reasoning."""
    block = EMPTY_BLOCK.match(turn.text, turn.spans[0][0]) if turn.spans else None
    if block is None or "reasoning_content" in message or CLOSE in message["content"]:
        return turn
    spans = [(max(start, block.end()), end) for start, end in turn.spans]
    return replace(turn, spans=[(start, end) for start, end in spans if start < end])


def _has_inserted_text(turn: _Turn, message: Message, special: Collection[str]) -> bool:
    """Returns whether the template adds text to an answer beyond the prompt: after it, or before one without reasoning.

    Special tokens, such as that which ends a turn, and white space do not count.
    """
    if not turn.spans:
        return False
    first, last = turn.spans[0][0], turn.spans[-1][1]
    generated = turn.text[first:last]
    place = _place_of(_texts_of(message), generated)
    if place is None:  # a part of it is outside the template's {% generation %} block
        return True
    before, after = generated[: place[0]], generated[place[1] :]
    is_answer_alone = "reasoning_content" not in message and CLOSE not in message["content"]
    if "tool_calls" in message:
        after = ""
    for token in special:
        after = after.replace(token, "")
    return bool(after.strip() or (is_answer_alone and before.strip()))


def _render_all(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, list[_Turn | None]]:
    """Returns the rendered conversation, and every assistant turn as generated."""
    text = render_text(tokenizer, messages)
    ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
    return text, [_generated_turn(tokenizer, messages[:end]) for end in ends]


def _generated_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> _Turn | None:
    """Returns the last message as generated, or None if the template does not render it after its prompt."""
    _, tools = without_tools(messages)
    has_blocks = GENERATION_BLOCK.search(require_chat_template(tokenizer, tools)) is not None
    try:
        prompt = render_text(tokenizer, messages[:-1], is_prompt=True)
        text, blocks = render_spans(tokenizer, messages, has_blocks=has_blocks)
        start = _turn_start(tokenizer, messages, prompt, text)
    except TemplateError:  # for instance, an assistant turn without a user turn has no prompt
        return None
    if start is None or start == len(text):
        return None
    shift = len(prompt) - start
    generated = blocks if has_blocks else [(start, len(text))]
    last = _end_of_turn(tokenizer, messages, text)
    bounded = [(max(begin, start), min(end, last)) for begin, end in generated]
    spans = [(begin + shift, end + shift) for begin, end in bounded if begin < end]
    return _Turn(len(messages), prompt + text[start:last], spans, len(prompt))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> int:
    """Returns where the last turn ends in `text`, without an end-of-text token that only the last turn gets.

    Phi-3's template adds one after the token that ends a turn, which is all that the target generates.
    """
    eos = tokenizer.eos_token
    if not isinstance(eos, str) or not text.endswith(eos):
        return len(text)
    turn = text.removesuffix(eos)
    content = messages[-1]["content"].rstrip()
    if content and turn.rstrip().endswith(content):  # nothing else ends the turn
        return len(text)
    try:
        continued = render_text(tokenizer, [*messages, {"role": "user", "content": "?"}])
    except TemplateError:
        return len(text)
    return len(turn) if continued.startswith(turn) and not continued.startswith(text) else len(text)


def _turn_start(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: str, text: str) -> int | None:
    """Returns where the last message begins in `text`, or None if that is ambiguous."""
    if text.startswith(prompt):
        return len(prompt)
    # Templates may render messages differently once others follow, so search `text` for the generation prompt.
    history = render_text(tokenizer, messages[:-1])
    cue = prompt.removeprefix(history)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    is_sure = prompt.startswith(history) and cue and text.count(cue) == num_answers
    return text.rindex(cue) + len(cue) if is_sure else None


def _cover(whole: str, turns: Sequence[_Turn]) -> list[Rendering]:
    """Returns texts in which every assistant turn is supervised once, as generated.

    The first text is the whole conversation if that contains the last turn. Each further text ends with the last turn
    that no earlier text contains.
    """
    renderings: list[Rendering] = []
    missing = list(turns)
    while missing:
        last = missing[-1]
        text = whole if not renderings and _spans_in(whole, last) else last.text
        contained = _contained_turns(text, missing)
        spans = [span for turn in sorted(contained) for span in contained[turn]]
        renderings.append(Rendering(text, spans, len(contained), last.number if renderings else 0))
        missing = [turn for turn in missing if turn.number not in contained]
    return renderings


def _contained_turns(text: str, turns: Sequence[_Turn]) -> dict[int, list[Span]]:
    """Returns the spans of the turns in `text`. If the spans of two turns touch, only the later turn counts."""
    contained: dict[int, list[Span]] = {}
    next_start = len(text) + 1
    for turn in reversed(turns):
        spans = _spans_in(text, turn)
        if spans and spans[-1][1] < next_start:
            contained[turn.number] = spans
            next_start = spans[0][0]
    return contained


def _spans_in(text: str, turn: _Turn) -> list[Span]:
    """Returns the spans of a turn in `text`, or [] if the turn or anything before it is not rendered as generated."""
    return turn.spans if text.startswith(turn.text) else []
