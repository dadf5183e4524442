"""Renders conversations with the target's chat template, and makes token ids and loss masks of them.

A conversation with n assistant turns is usually one text with n spans that the assistant generates. But some templates
render a turn differently once the conversation continues; Qwen3's, for instance, strips reasoning from the history.
Such a turn gets an additional text: its prompt and the turn as generated. In this text, earlier turns that appear as
generated are supervised too, unless another text already supervises them. Working backwards from the last turn gives
the smallest number of texts.

An assistant turn is what the template renders after the turn's prompt, whether or not it has `{% generation %}` blocks,
except an empty think block before an answer without reasoning, which a server's prompt holds where the target does not
think. A turn that is not rendered after its prompt is never supervised, since no server asks for it that way.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import refuse_dropped_prompts, render_text, require_chat_template, special_tokens
from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import printable

Span = tuple[int, int]
"""Characters [start, end) of a text."""
OPEN, CLOSE = "<think>", "</think>"
EMPTY_BLOCK = re.compile(rf"\s*({OPEN})?\s*{CLOSE}\s*")
"""An empty think block, which the prompt may begin."""


@dataclass(frozen=True)
class Rendering:
    """A conversation, or its beginning up to one assistant turn, as text."""

    text: str
    answers: list[Span]
    """Characters that the assistant generates, for each assistant turn that is supervised in this text, ascending."""
    turn: int = 0
    """0 for the first text of a conversation; otherwise the number of the text's last message, counted from 1."""


@dataclass(frozen=True)
class RenderedConversation:
    """The fewest texts in which every assistant turn that can be supervised is supervised once, as generated."""

    renderings: list[Rendering]
    trained: int
    """Number of assistant turns that are to be trained."""
    counts: Mapping[str, int]
    """Numbers of its assistant turns that are not to be trained, or have no end, by their names in `COUNTS`."""


@dataclass(frozen=True)
class Encoding:
    """A document before it is cut into windows."""

    input_ids: NDArray[np.int32]  # [S]
    loss_mask: NDArray[np.uint8]  # [S], 1 where the assistant generates the token
    turn: int = 0
    """0 for the first document of an item; for others see `Rendering.turn`."""
    answers: int = 0
    """Number of assistant turns that are supervised in this document."""


@dataclass(frozen=True)
class EncodedItem:
    """The documents of a file, a conversation or a row of tokens, usually one."""

    encodings: list[Encoding]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its assistant turns, by their names in `COUNTS` of prompts_report.py."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a target whose chat template or tokenizer cannot say which tokens the assistant generates."""
    require_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            "target.path: loss masks must be made with a fast tokenizer (tokenizer.json), but "
            f"{tokenizer.name_or_path} has a slow one; convert it"
        )


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], is_generated: bool = False
) -> RenderedConversation:
    """Renders a conversation, whose answers need no check if the target generated them, or raises ConversationRefused.

    The first text contains the last assistant turn that can be located and is to be trained.
    """
    trained = _trained_answers(messages, () if is_generated else set(special_tokens(tokenizer).values()))
    try:
        whole = render_text(tokenizer, messages)
        located = [_generated_turn(tokenizer, messages[:number]) for number in trained]
    except TemplateError as error:
        reason = printable(str(error)) or "it gives no reason"
        raise ConversationRefused(f"the chat template fails: {reason}") from error
    refuse_dropped_prompts(whole, messages)
    turns = [turn for turn in located if turn is not None]
    if not turns:
        raise ConversationRefused("the chat template renders no answer as the continuation of its prompt")
    if not is_generated:
        for turn in turns:
            _refuse_rewritten(turn)
            _refuse_dropped_calls(tokenizer, messages[: turn.number], turn)
        turns = [_without_empty_block(turn) for turn in turns]
    counts = {
        "answers_untrained": sum("weight" in each for each in messages),
        "answers_endless": sum(_ends_with(turn.text, turn.message) for turn in turns),
    }
    return RenderedConversation(_cover(whole, turns), len(trained), counts)


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[RenderedConversation]
) -> list[EncodedItem]:
    renderings = [rendering for each in conversations for rendering in each.renderings]
    batch = iter(_tokenize(tokenizer, [rendering.text for rendering in renderings]))
    special_ids = list(special_tokens(tokenizer))
    items = []
    for each in conversations:
        own = [_encode(tokenizer, special_ids, rendering, next(batch)) for rendering in each.renderings]
        left_out = each.trained - sum(encoding.answers for encoding in own)
        items.append(EncodedItem(own, {"answers_left_out": left_out, **each.counts}))
    return items


@dataclass(frozen=True)
class _Turn:
    """An assistant turn as generated, after its prompt."""

    message: Message
    number: int
    """Number of the message, from 1."""
    text: str
    """The prompt, the response, and the text that the template adds after it."""
    start: int
    """Length of the prompt."""


def _trained_answers(messages: Sequence[Message], forbidden: Collection[str]) -> list[int]:
    """Returns the numbers, from 1, of the assistant turns to be trained, if there are any and all have text.

    No answer may hold one of the `forbidden` special tokens, because the target does not generate them within one.
    """
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    trained = [number for number in answers if "weight" not in messages[number - 1]]
    if not trained:
        raise ConversationRefused("no assistant turn that is to be trained" if answers else "no assistant turn")
    for message in (messages[number - 1] for number in trained):
        reasoning, calls = message.get("reasoning_content", ""), message.get("tool_calls", [])
        if not (message["content"].strip() or reasoning or calls):
            raise ConversationRefused("an answer without text")
        text = "\n".join([reasoning, message["content"], json.dumps(calls, ensure_ascii=False)])
        if found := sorted(token for token in forbidden if token in text):
            raise ConversationRefused(f"an answer with the special token {found[0]} in its text")
    return trained


def _generated_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> _Turn | None:
    """Returns the last message as generated, or None if the template does not render it after its prompt."""
    try:
        prompt = render_text(tokenizer, messages[:-1], is_prompt=True)
        text = render_text(tokenizer, messages)
    except TemplateError:  # for instance, an assistant turn without a user turn has no prompt
        return None
    if not text.startswith(prompt) or text == prompt:
        return None
    return _Turn(messages[-1], len(messages), text[: _end_of_turn(tokenizer, messages, text)], len(prompt))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> int:
    """Returns where the last turn ends in `text`, without an end-of-text token that only the last turn gets.

    Phi-3's template adds one after the token that ends a turn, which is all that the target generates.
    """
    eos = tokenizer.eos_token
    if not isinstance(eos, str) or not text.endswith(eos):
        return len(text)
    turn = text.removesuffix(eos)
    if _ends_with(turn, messages[-1]):  # nothing else ends the turn
        return len(text)
    try:
        continued = render_text(tokenizer, [*messages, {"role": "user", "content": "?"}])
    except TemplateError:
        return len(text)
    return len(turn) if continued.startswith(turn) and not continued.startswith(text) else len(text)


def _ends_with(text: str, message: Message) -> bool:
    """Returns whether a text ends with a message's content, white space aside."""
    content = message["content"].rstrip()
    return bool(content) and text.rstrip().endswith(content)


def _refuse_rewritten(turn: _Turn) -> None:
    """Raises ConversationRefused if the template does not render all that an answer holds, in its order.

    White space may differ at the beginning and end of a text. A thought may begin in the prompt, and an empty one may
    precede an answer without reasoning.
    """
    prompt, generated = turn.text[: turn.start], turn.text[turn.start :]
    content, reasoning, place = turn.message["content"], turn.message.get("reasoning_content", ""), 0
    for text in filter(None, map(str.strip, [reasoning, *re.split(f"{OPEN}|{CLOSE}", content)])):
        place = generated.find(text, place)
        if place < 0:
            raise ConversationRefused("an answer or reasoning that the chat template does not render as it is written")
        place += len(text)
    calls = [call["function"] for call in turn.message.get("tool_calls", [])]
    if any(word not in generated for each in calls for word in (each["name"], *each["arguments"])):
        raise ConversationRefused("a tool call that the chat template does not render")
    written, rendered = content.count(CLOSE) + bool(reasoning), generated.count(CLOSE)
    if content.count(OPEN) > content.count(CLOSE):
        raise ConversationRefused("an answer that ends inside a thought")
    if rendered > generated.count(OPEN) + prompt.rstrip().endswith(OPEN):
        raise ConversationRefused(f"an answer with {CLOSE} for a thought that neither it nor its prompt begins")
    if (written and rendered != written) or (not rendered and prompt.rstrip().endswith(OPEN)):
        raise ConversationRefused(f"an answer with {written} thoughts, of which the chat template renders {rendered}")


def _refuse_dropped_calls(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turn: _Turn) -> None:
    """Raises ConversationRefused if the last message has the same text without one of its calls."""
    calls = turn.message.get("tool_calls", [])
    for index in range(len(calls)):
        message = turn.message | {"tool_calls": calls[:index] + calls[index + 1 :]}
        if not message["tool_calls"]:
            del message["tool_calls"]
        try:
            text = render_text(tokenizer, [*messages[:-1], message])
        except TemplateError:  # for instance, a message without content and calls
            continue
        if text.startswith(turn.text):
            raise ConversationRefused("a tool call that the chat template does not render")


def _without_empty_block(turn: _Turn) -> _Turn:
    """Returns the turn without the empty think block that a template puts before an answer without reasoning."""
    has_reasoning = "reasoning_content" in turn.message or CLOSE in turn.message["content"]
    block = None if has_reasoning else EMPTY_BLOCK.match(turn.text, turn.start)
    return turn if block is None else replace(turn, start=block.end())


def _cover(whole: str, turns: Sequence[_Turn]) -> list[Rendering]:
    """Returns texts in which every assistant turn is supervised once, as generated.

    The first text is the whole conversation if that contains the last turn. Each further text ends with the last turn
    that no earlier text contains. A text contains a turn if it begins with the turn's prompt and the turn as generated.
    """
    renderings: list[Rendering] = []
    missing = list(turns)
    while missing:
        last = missing[-1]
        text = whole if not renderings and whole.startswith(last.text) else last.text
        contained: list[_Turn] = []
        next_start = len(text) + 1
        for turn in reversed(missing):
            if text.startswith(turn.text) and len(turn.text) < next_start:  # spans of two turns must not touch
                contained.insert(0, turn)
                next_start = turn.start
        spans = [(turn.start, len(turn.text)) for turn in contained]
        renderings.append(Rendering(text, spans, last.number if renderings else 0))
        missing = [turn for turn in missing if turn not in contained]
    return renderings


class _Tokens(NamedTuple):
    """The tokens of a text, with the characters [start, end) of each."""

    ids: NDArray[np.int32]  # [S]
    starts: NDArray[np.int64]  # [S]
    ends: NDArray[np.int64]  # [S]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[_Tokens]:
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = []
    for token_ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
        # Some tokenizers exclude the leading space of a token from its offsets.
        starts = np.minimum(starts, np.concatenate([[0], ends[:-1]]))
        tokens.append(_Tokens(np.asarray(token_ids, np.int32), starts, ends))
    return tokens


def _encode(
    tokenizer: PreTrainedTokenizerBase, special_ids: Sequence[int], rendering: Rendering, tokens: _Tokens
) -> Encoding:
    """Returns the document of a text. A token across the border of an answer is split, as a server tokenizes it.

    An answer for which this is impossible, because the tokenizer changes the pieces of a text, is left out.
    """
    crossed = _crossed_borders(special_ids, rendering, tokens)
    if crossed:
        pieces = [rendering.text[start:end] for start, end in pairwise([0, *sorted(crossed), len(rendering.text)])]
        shifts = np.cumsum([0, *map(len, pieces[:-1])])
        parts = zip(_tokenize(tokenizer, pieces), shifts, strict=True)
        shifted = [(part.ids, part.starts + shift, part.ends + shift) for part, shift in parts]
        split = _Tokens(*map(np.concatenate, zip(*shifted, strict=True)))
        if tokenizer.decode(split.ids) == tokenizer.decode(tokens.ids):
            tokens, crossed = split, set()
    mask, num_answers = np.zeros(len(tokens.ids), np.uint8), 0
    for span in rendering.answers:
        if crossed.isdisjoint(span):
            num_answers += 1
            mask[_generated_tokens(special_ids, rendering.text, span, tokens)] = 1
    return Encoding(tokens.ids, mask, rendering.turn, num_answers)


def _generated_tokens(special_ids: Sequence[int], text: str, span: Span, tokens: _Tokens) -> NDArray[np.int64]:
    """Returns the tokens that begin in a span, without white space after the end-of-turn token."""
    start, end = span
    inside = np.flatnonzero((tokens.starts >= start) & (tokens.starts < end))
    specials = np.flatnonzero(np.isin(tokens.ids[inside], special_ids))
    if len(specials) and not text[tokens.ends[inside[specials[-1]]] : end].strip():
        return inside[: specials[-1] + 1]
    return inside


def _crossed_borders(special_ids: Sequence[int], rendering: Rendering, tokens: _Tokens) -> set[int]:
    """Returns the borders of answers that are inside a token.

    A server's prompt ends with such a border, and so does an answer, so no server sees such a token there. The end of a
    span counts only if it is inside a token of generated text: a special token may include white space after it.
    """
    borders = set()
    for start, end in rendering.answers:
        if ((tokens.starts < start) & (start < tokens.ends)).any():
            borders.add(start)
        inside = _generated_tokens(special_ids, rendering.text, (start, end), tokens)
        if ((tokens.ends[inside] > end) & ~np.isin(tokens.ids[inside], special_ids)).any():
            borders.add(end)
    return borders
