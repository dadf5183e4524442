"""Renders conversations with the target's chat template, and makes token ids and loss masks of them.

A conversation with n assistant turns is usually one text with n spans that the assistant generates. But some templates
render a turn differently once the conversation continues; Qwen3's, for instance, strips reasoning from the history.
Such a turn gets an additional text: its prompt and the turn as generated. In this text, earlier turns that appear as
generated are supervised too, unless another text already supervises them. Working backwards from the last turn gives
the smallest number of texts.

An assistant turn is what the template renders after the turn's prompt, except an empty think block before an answer
without reasoning, which a server's prompt holds where the target does not think. If the template has
`{% generation %}` blocks, only their text in it is supervised. A turn that is not rendered after its prompt is never
supervised, since no server asks for it that way.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import (
    Span,
    refuse_dropped_prompts,
    render_spans,
    render_text,
    require_chat_template,
    special_tokens,
)
from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.data.tool_calls import call_words
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import printable

NO_ANSWER = "no assistant turn"
"""Reason for refusing a conversation without an assistant turn."""
OPEN, CLOSE = "<think>", "</think>"
THINK_TAG = re.compile(f"{OPEN}|{CLOSE}")
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_BLOCK = re.compile(rf"\s*({OPEN})?\s*{CLOSE}\s*")
"""An empty think block, which the prompt may begin."""
_QUESTION: Message = {"role": "user", "content": "What is two and two?"}
_PROBES: list[list[Message]] = [
    [_QUESTION, {"role": "assistant", "content": "Four."}],
    [_QUESTION, {"role": "assistant", "content": "Four.", "reasoning_content": "A sum."}],
    [_QUESTION, {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\nFour."}],
]
"""Conversations, of which a template must render one: some templates ask for reasoning."""


@dataclass(frozen=True)
class Rendering:
    """A conversation, or its beginning up to one assistant turn, as text."""

    text: str
    spans: list[Span]
    """Characters that the assistant generates, ascending."""
    answers: int
    """Number of assistant turns that the spans belong to."""
    turn: int = 0
    """0 for the first text of a conversation; otherwise the number of the text's last message, counted from 1."""


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
class RenderedConversation:
    """The fewest texts in which every assistant turn that can be supervised is supervised once, as generated."""

    renderings: list[Rendering]
    trained: int
    """Number of assistant turns that are to be trained."""
    untrained: int
    """Number of assistant turns that are not to be trained, because the data say so."""
    inserted: int
    """Number of assistant turns that begin or end with text of the template, such as an empty think block."""


@dataclass(frozen=True)
class EncodedItem:
    """The documents of a file, a conversation or a row of tokens, usually one, with counts of its assistant turns."""

    encodings: list[Encoding]
    answers_left_out: int = 0
    answers_untrained: int = 0
    answers_inserted: int = 0
    # `COUNTS` of prompts_report.py describes these counts.


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], is_generated: bool = False
) -> RenderedConversation:
    """Renders a conversation, whose answers need no check if the target generated them.

    The first text contains the last assistant turn that can be located and is to be trained.

    Raises:
        ConversationRefused: an answer cannot be supervised as it is written, or the template drops a prompt or fails.
    """
    special = set(special_tokens(tokenizer).values())
    trained = _trained_answers(messages, () if is_generated else special)
    require_chat_template(tokenizer, messages)
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
    num_inserted = 0
    if not is_generated:
        for turn in turns:
            _refuse_rewritten(turn)
        num_inserted = sum(_has_inserted_text(turn, special) for turn in turns)
        turns = [_without_empty_block(turn) for turn in turns]
    renderings = _cover(whole, [turn for turn in turns if turn.spans])
    if not renderings:
        raise ConversationRefused("the chat template's {% generation %} block contains no text of an assistant message")
    num_untrained = sum("weight" in message for message in messages)
    return RenderedConversation(renderings, len(trained), num_untrained, num_inserted)


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[RenderedConversation]
) -> list[EncodedItem]:
    """Returns token ids and loss masks. An answer with a token across its border that cannot be split is left out."""
    renderings = [rendering for each in conversations for rendering in each.renderings]
    batch = iter(_tokenize(tokenizer, [rendering.text for rendering in renderings]) if renderings else [])
    items, special_ids = [], list(special_tokens(tokenizer))
    for each in conversations:
        own = [_encode(tokenizer, special_ids, rendering, next(batch)) for rendering in each.renderings]
        left_out = each.trained - sum(encoding.answers for encoding in own)
        items.append(EncodedItem(own, left_out, each.untrained, each.inserted))
    return items


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render short conversations, to find errors of the template and the tokenizer before processing the data."""
    require_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            "target.path: loss masks must be made with a fast tokenizer (tokenizer.json), but "
            f"{tokenizer.name_or_path} has a slow one; convert it"
        )
    refusals = []
    for probe in _PROBES:
        try:
            render_conversation(tokenizer, probe)
            return
        except ConversationRefused as refusal:
            refusals.append(str(refusal))
    raise UserError(
        f"target.path: the chat template of {tokenizer.name_or_path} must show which tokens the assistant generates, "
        f"but for the question {_QUESTION['content']!r}, {refusals[0]}; correct the template, so that it renders an "
        "answer after exactly the prompt that a server sends"
    )


@dataclass(frozen=True)
class _Turn:
    """An assistant turn as generated, after its prompt."""

    message: Message
    number: int
    """Number of the message, from 1."""
    text: str
    """The prompt, the response, and the text that the template adds after it."""
    spans: list[Span]
    start: int
    """Length of the prompt."""


def _trained_answers(messages: Sequence[Message], forbidden: Collection[str]) -> list[int]:
    """Returns the numbers, from 1, of the assistant turns to be trained, if there are any and all have text.

    No answer may hold one of the `forbidden` special tokens, because the target does not generate them within one.
    """
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    trained = [number for number in answers if "weight" not in messages[number - 1]]
    if not trained:
        raise ConversationRefused("no assistant turn that is to be trained" if answers else NO_ANSWER)
    for message in (messages[number - 1] for number in trained):
        reasoning, calls = message.get("reasoning_content", ""), message.get("tool_calls", [])
        if not (message["content"].strip() or reasoning or calls):
            raise ConversationRefused("an answer without text")
        text = "\n".join([reasoning, message["content"], json.dumps(calls, ensure_ascii=False)])
        if found := sorted(token for token in forbidden if token in text):
            raise ConversationRefused(f"an answer with the special token {found[0]} in its text")
        if OPEN in reasoning or CLOSE in reasoning:
            raise ConversationRefused(f"reasoning with {OPEN} or {CLOSE} in its text")
    return trained


def _refuse_rewritten(turn: _Turn) -> None:
    """Raises ConversationRefused if the template renders an answer otherwise than it is written.

    White space may differ at the beginning and end of a text. A reasoning block may begin in the prompt, and an empty
    one may precede an answer without reasoning.
    """
    prompt, generated = turn.text[: turn.start].rstrip(), turn.text[turn.start :]
    content, reasoning = turn.message["content"], turn.message.get("reasoning_content", "")
    place = 0
    for text in filter(None, map(str.strip, [reasoning, *THINK_TAG.split(content)])):
        place = generated.find(text, place)
        if place < 0:
            raise ConversationRefused("an answer or reasoning that the chat template does not render as it is written")
        place += len(text)
    if any(word not in generated for call in turn.message.get("tool_calls", []) for word in call_words(call)):
        raise ConversationRefused("a tool call that the chat template does not render")
    written, rendered = THINK_TAG.findall(content), THINK_TAG.findall(generated)
    has_block = bool(reasoning) or content.lstrip().startswith(OPEN) or written[:1] == [CLOSE]
    if reasoning:
        written = [OPEN, CLOSE, *written]
    elif written[:1] == [CLOSE]:  # the prompt opens the block
        written = [OPEN, *written]
    if is_open := prompt.endswith(OPEN):
        rendered = [OPEN, *rendered]
    if has_block:
        fits = rendered == written and written[1:2] == [CLOSE] and not prompt.endswith(CLOSE)
    else:
        fits = rendered == [OPEN, CLOSE, *written] or (rendered == written and not is_open)
    if not fits:
        tags = f"{' '.join(rendered) or 'none'} instead of {' '.join(written) or 'none'}"
        raise ConversationRefused(f"an answer that the chat template renders with other think tags: {tags}")


def _has_reasoning(message: Message) -> bool:
    return "reasoning_content" in message or CLOSE in message["content"]


def _without_empty_block(turn: _Turn) -> _Turn:
    """Returns the turn without the empty think block that a template puts before an answer without reasoning."""
    block = EMPTY_BLOCK.match(turn.text, turn.spans[0][0]) if turn.spans else None
    if block is None or _has_reasoning(turn.message):
        return turn
    spans = [(max(start, block.end()), end) for start, end in turn.spans]
    return replace(turn, spans=[(start, end) for start, end in spans if start < end])


def _has_inserted_text(turn: _Turn, special: Collection[str]) -> bool:
    """Returns whether an answer without calls has more text, or less, than its message.

    Special tokens, such as that which ends a turn, tags of its reasoning and white space do not count.
    """
    if not turn.spans or "tool_calls" in turn.message:
        return False
    generated = turn.text[turn.spans[0][0] : turn.spans[-1][1]]
    written = turn.message.get("reasoning_content", "") + turn.message["content"]
    for token in (*special, *((OPEN, CLOSE) if _has_reasoning(turn.message) else ())):
        generated, written = generated.replace(token, ""), written.replace(token, "")
    return "".join(generated.split()) != "".join(written.split())


def _generated_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> _Turn | None:
    """Returns the last message as generated, or None if the template does not render it after its prompt."""
    has_blocks = GENERATION_BLOCK.search(require_chat_template(tokenizer, messages)) is not None
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
    return _Turn(messages[-1], len(messages), prompt + text[start:last], spans, len(prompt))


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
            if text.startswith(turn.text) and turn.spans[-1][1] < next_start:  # spans of two turns must not touch
                contained.insert(0, turn)
                next_start = turn.spans[0][0]
        spans = [span for turn in contained for span in turn.spans]
        renderings.append(Rendering(text, spans, len(contained), last.number if renderings else 0))
        numbers = {turn.number for turn in contained}
        missing = [turn for turn in missing if turn.number not in numbers]
    return renderings


def _encode(
    tokenizer: PreTrainedTokenizerBase, special_ids: Sequence[int], rendering: Rendering, tokens: "_Tokens"
) -> Encoding:
    mask = _loss_mask(rendering, tokens, special_ids)
    is_text = (mask == 1) & ~np.isin(tokens.ids, special_ids)  # [S], whether a token is generated text
    borders, left_out = _crossed_borders(rendering.spans, tokens, is_text), 0
    if borders:
        pieces = [rendering.text[start:end] for start, end in pairwise([0, *borders, len(rendering.text)])]
        shifts = np.cumsum([0, *map(len, pieces[:-1])])
        parts = zip(_tokenize(tokenizer, pieces), shifts, strict=True)
        shifted = [(part.ids, part.starts + shift, part.ends + shift) for part, shift in parts]
        split = _Tokens(*map(np.concatenate, zip(*shifted, strict=True)))
        if tokenizer.decode(split.ids) == tokenizer.decode(tokens.ids):
            tokens, mask = split, _loss_mask(rendering, split, special_ids)
        else:
            crossed = [span for span in rendering.spans if _crossed_borders([span], tokens, is_text)]
            left_out = min(len(crossed), rendering.answers)  # an answer may have several spans
            for start, end in crossed:
                mask[(tokens.starts < end) & (tokens.ends > start)] = 0
    return Encoding(tokens.ids, mask, rendering.turn, rendering.answers - left_out)


class _Tokens(NamedTuple):
    """The tokens of a text, with the characters [start, end) of each."""

    ids: NDArray[np.int32]  # [S]
    starts: NDArray[np.int64]  # [S]
    ends: NDArray[np.int64]  # [S]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[_Tokens]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    texts_tokens = []
    for token_ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
        # Some tokenizers exclude the leading space of a token from its offsets.
        starts = np.minimum(starts, np.concatenate([[0], ends[:-1]]))
        texts_tokens.append(_Tokens(np.asarray(token_ids, np.int32), starts, ends))
    return texts_tokens


def _loss_mask(rendering: Rendering, tokens: _Tokens, special_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Returns the mask [S] of tokens that begin in the spans, without white space after the end-of-turn token."""
    mask = np.zeros(len(tokens.ids), np.uint8)
    is_special = np.isin(tokens.ids, special_ids)  # [S]
    for start, end in rendering.spans:
        inside = np.flatnonzero((tokens.starts >= start) & (tokens.starts < end))
        specials = np.flatnonzero(is_special[inside])
        if len(specials) and not rendering.text[tokens.ends[inside[specials[-1]]] : end].strip():
            inside = inside[: specials[-1] + 1]
        mask[inside] = 1
    return mask


def _crossed_borders(spans: Sequence[Span], tokens: _Tokens, is_text: NDArray[np.bool_]) -> list[int]:
    """Returns the borders of spans that are inside a token, ascending.

    A server's prompt ends with such a border, and so does an answer, so no server sees such a token there. The end of a
    span counts only if it is inside a token of generated text: a special token may include white space after it.
    """
    borders = set()
    for start, end in spans:
        if ((tokens.starts < start) & (start < tokens.ends)).any():
            borders.add(start)
        if ((tokens.starts < end) & (end < tokens.ends) & is_text).any():
            borders.add(end)
    return sorted(borders)
