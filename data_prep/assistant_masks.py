"""Conversations -> token ids and a mask of the tokens that the assistant generates, by the target's own chat template.

A template with a `{% generation %}` block says itself what the assistant generates. With any other, the text rendered up to an
answer, with the prompt for it, is compared with the text rendered up to and including it: the difference is the answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data_prep.conversations import ConversationRefused, Message
from mtptrain.prompt_files import require_chat_template

Span = tuple[int, int]

_PROBE: list[Message] = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]


@dataclass(frozen=True)
class Rendering:
    """A conversation as text."""

    text: str
    spans: list[Span]
    """Characters [start, end) that the assistant generates, one span per answer."""
    rewritten_answers: int = 0
    """Answers that the template shows otherwise once the conversation goes on (reasoning removed, say): outside all spans."""


@dataclass(frozen=True)
class Encoding:
    """A document before it is cut into windows."""

    input_ids: NDArray[np.int32]  # [S]
    loss_mask: NDArray[np.uint8]  # [S], 1 where the assistant generates the token
    rewritten_answers: int = 0


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a conversation of one question and one answer, to stop before long work.

    Raises:
        ValueError: there is no template, the tokenizer cannot relate tokens to text, or no token of the answer is found.
    """
    require_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise ValueError(
            f"target.path: the tokenizer must be a fast one (tokenizer.json) for masks, but that of {tokenizer.name_or_path} is not"
            "; convert it"
        )
    try:
        [encoding] = encode_renderings(tokenizer, [render_conversation(tokenizer, _PROBE)])
    except ConversationRefused as refusal:
        raise empty_mask_error(tokenizer, str(refusal)) from refusal
    if not encoding.loss_mask.any():
        raise empty_mask_error(tokenizer, "its {% generation %} block holds no text for an assistant's message")


def empty_mask_error(tokenizer: PreTrainedTokenizerBase, reason: str) -> ValueError:
    """All-zero masks would train at zero loss."""
    return ValueError(
        f"target.path: the chat template of {tokenizer.name_or_path} must tell which tokens the assistant generates, but the loss "
        f"mask is empty: {reason}; correct the template ({{% generation %}} ... {{% endgeneration %}} around an answer) or the data"
    )


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Rendering:
    """Render a conversation and find its answers.

    Raises:
        ConversationRefused: the template does not accept the messages, or no answer can be told from what surrounds it.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise ConversationRefused("no answer of the assistant")
    try:
        if _has_generation_block(require_chat_template(tokenizer)):
            return _rendering_by_blocks(tokenizer, messages)
        return _rendering_by_prefixes(tokenizer, messages)
    except TemplateError as error:
        raise ConversationRefused(f"the chat template answers: {error}") from error


def _has_generation_block(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _rendering_by_blocks(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Rendering:
    text, spans = _render(tokenizer, messages, return_assistant_tokens_mask=True)
    return Rendering(text, spans)


def _rendering_by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Rendering:
    text, _ = _render(tokenizer, messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [span for i in answers if (span := _answer_span(tokenizer, text, messages, i)) is not None]
    if not spans:
        raise ConversationRefused("the chat template renders no answer as the continuation of its prompt")
    return Rendering(text, spans, rewritten_answers=len(answers) - len(spans))


def _answer_span(tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Message], index: int) -> Span | None:
    """Where answer `index` stands in `text`, None if the template renders it otherwise there than when it is generated."""
    prompt, _ = _render(tokenizer, messages[:index], add_generation_prompt=True)
    with_answer, _ = _render(tokenizer, messages[: index + 1])
    in_place = text.startswith(prompt) and text.startswith(with_answer) and len(prompt) < len(with_answer)
    return (len(prompt), len(with_answer)) if in_place else None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **settings: bool) -> tuple[str, list[Span]]:
    """Text and, if asked for, the characters of its generation blocks."""
    # Not apply_chat_template: it refuses the empty list in front of an answer without a question, and its mask loses the last
    # bytes of a span that ends inside a character of several tokens.
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **settings}
    rendered: Any = render_jinja_template(conversations=[list(messages)], chat_template=tokenizer.get_chat_template(), **variables)
    texts, spans = rendered
    return texts[0], spans[0] if spans else []


def encode_renderings(tokenizer: PreTrainedTokenizerBase, renderings: Sequence[Rendering]) -> list[Encoding]:
    """Token ids and masks of many conversations; the template has written all special tokens."""
    if not renderings:
        return []
    texts = [rendering.text for rendering in renderings]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special_ids = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
    encodings = []
    for rendering, token_ids, offsets in zip(renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        input_ids = np.asarray(token_ids, np.int32)  # [S]
        is_special = np.isin(input_ids, special_ids)  # [S]
        mask = _loss_mask(rendering, np.asarray(offsets, np.int64).reshape(-1, 2), is_special)
        encodings.append(Encoding(input_ids, mask, rendering.rewritten_answers))
    return encodings


def _loss_mask(rendering: Rendering, offsets: NDArray[np.int64], is_special: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Which tokens [S], at characters `offsets` [S, 2], lie in a span.

    A token that begins before its span holds the end of the prompt, so the assistant cannot have generated it.
    """
    mask = np.zeros(len(offsets), np.uint8)
    ends = offsets[:, 1]
    # Some tokenizers leave the leading space of a token out of its offsets.
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
    for start, end in rendering.spans:
        inside = np.flatnonzero((starts >= start) & (starts < end))
        mask[inside[: _generated(rendering.text[:end], ends[inside], is_special[inside])]] = 1
    return mask


def _generated(text: str, ends: NDArray[np.int64], is_special: NDArray[np.bool_]) -> int:
    """How many tokens of a span are generated: white space behind the end-of-turn token is the template's."""
    specials = np.flatnonzero(is_special)
    if len(specials) and not text[ends[specials[-1]] :].strip():
        return int(specials[-1]) + 1
    return len(is_special)
