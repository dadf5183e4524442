"""Tokenizes rendered conversations, and makes loss masks that select the tokens that the assistant generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import Span, render_text, require_chat_template, special_tokens
from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.tool_calls import Message
from mtptrain.utils.errors import UserError

from .renderings import Rendering, render_conversation

_QUESTION: Message = {"role": "user", "content": "What is two and two?"}
_ANSWER: Message = {"role": "assistant", "content": "Four."}
_PROBES: list[list[Message]] = [
    [_QUESTION, _ANSWER],
    [_QUESTION, _ANSWER | {"reasoning_content": "A sum."}],
    [_QUESTION, {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\nFour."}],
]
"""Conversations. A template must accept the first, and the loss mask of one must select tokens: some templates ask for
reasoning."""


@dataclass(frozen=True)
class Encoding:
    """A document before it is cut into windows."""

    input_ids: NDArray[np.int32]  # [S]
    loss_mask: NDArray[np.uint8]  # [S], 1 where the assistant generates the token
    turn: int = 0
    """0 for a file and for the first document of a conversation; for other documents see `Rendering.turn`."""
    answers: int = 0
    """Number of assistant turns that are supervised in this document."""
    answers_left_out: int = 0
    """See `Rendering.answers_left_out`; also counts answers with a token across their border that cannot be split."""
    answers_untrained: int = 0
    """See `Rendering.answers_untrained`."""
    answers_inserted: int = 0
    """See `Rendering.answers_inserted`."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a short conversation, to find errors before processing the data.

    Raises:
        UserError: the chat template is missing or fails, the tokenizer cannot map tokens to characters, or the mask of
            the assistant turn is empty.
    """
    require_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            "target.path: loss masks must be made with a fast tokenizer (tokenizer.json), but "
            f"{tokenizer.name_or_path} has a slow one; convert it"
        )
    try:
        render_text(tokenizer, _PROBES[0])
    except TemplateError as error:
        raise UserError(
            f"target.path: the chat template of {tokenizer.name_or_path} must render a question and its answer, but "
            f"for the test conversation {_QUESTION['content']!r} it reports: {' '.join(str(error).split())}; correct "
            "the template in the target's directory, or choose another target"
        ) from error
    refusals = []
    for probe in _PROBES:
        try:
            [encoding] = encode_renderings(tokenizer, render_conversation(tokenizer, probe))
        except ConversationRefused as refusal:
            refusals.append(str(refusal))
            continue
        if encoding.loss_mask.any():
            return
        refusals.append("its {% generation %} block contains no text of an assistant message")
    raise empty_mask_error(tokenizer, refusals[0])


def empty_mask_error(tokenizer: PreTrainedTokenizerBase, reason: str) -> UserError:
    """Returns the error for loss masks that select no token, from which training would learn nothing."""
    return UserError(
        f"target.path: the chat template of {tokenizer.name_or_path} must show which tokens the assistant generates, "
        f"but the loss mask is empty: {reason}; correct the template, so that it renders an answer after exactly the "
        "prompt that a server sends, or the data"
    )


def encode_renderings(tokenizer: PreTrainedTokenizerBase, renderings: Sequence[Rendering]) -> list[Encoding]:
    """Returns token ids and loss masks of texts that already contain all special tokens."""
    if not renderings:
        return []
    texts = [rendering.text for rendering in renderings]
    special_ids = list(special_tokens(tokenizer))
    encodings = []
    for rendering, tokens in zip(renderings, _tokenize(tokenizer, texts), strict=True):
        mask = _loss_mask(rendering, tokens, special_ids)
        is_text = (mask == 1) & ~np.isin(tokens.ids, special_ids)  # [S], whether a token is generated text
        borders, left_out = _crossed_borders(rendering.spans, tokens, is_text), 0
        if borders:
            pieces = [rendering.text[start:end] for start, end in pairwise([0, *borders, len(rendering.text)])]
            split = _Tokens.join(pieces, _tokenize(tokenizer, pieces))
            if tokenizer.decode(split.ids) == tokenizer.decode(tokens.ids):
                tokens, mask = split, _loss_mask(rendering, split, special_ids)
            else:
                crossed = [span for span in rendering.spans if _crossed_borders([span], tokens, is_text)]
                left_out = min(len(crossed), rendering.answers)  # an answer may have several spans
                for start, end in crossed:
                    mask[(tokens.starts < end) & (tokens.ends > start)] = 0
        counts = (rendering.answers - left_out, rendering.answers_left_out + left_out)
        encodings.append(
            Encoding(tokens.ids, mask, rendering.turn, *counts, rendering.answers_untrained, rendering.answers_inserted)
        )
    return encodings


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text, with the characters [start, end) of each."""

    ids: NDArray[np.int32]  # [S]
    starts: NDArray[np.int64]  # [S]
    ends: NDArray[np.int64]  # [S]

    @staticmethod
    def join(pieces: Sequence[str], tokens: Sequence["_Tokens"]) -> "_Tokens":
        """Returns the tokens of a text from those of its pieces."""
        shifts = np.cumsum([0, *map(len, pieces[:-1])])
        return _Tokens(
            np.concatenate([part.ids for part in tokens]),
            np.concatenate([part.starts + shift for part, shift in zip(tokens, shifts, strict=True)]),
            np.concatenate([part.ends + shift for part, shift in zip(tokens, shifts, strict=True)]),
        )


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[_Tokens]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found = []
    for token_ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
        # Some tokenizers exclude the leading space of a token from its offsets.
        starts = np.minimum(starts, np.concatenate([[0], ends[:-1]]))
        found.append(_Tokens(np.asarray(token_ids, np.int32), starts, ends))
    return found


def _loss_mask(rendering: Rendering, tokens: _Tokens, special_ids: Sequence[int]) -> NDArray[np.uint8]:
    """Returns the mask [S] of tokens that begin in the spans."""
    mask = np.zeros(len(tokens.ids), np.uint8)
    is_special = np.isin(tokens.ids, special_ids)  # [S]
    for start, end in rendering.spans:
        inside = np.flatnonzero((tokens.starts >= start) & (tokens.starts < end))
        mask[inside[: _num_generated(rendering.text[:end], tokens.ends[inside], is_special[inside])]] = 1
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


def _num_generated(text: str, ends: NDArray[np.int64], is_special: NDArray[np.bool_]) -> int:
    """Returns the number of generated tokens in a span, not counting white space after the end-of-turn token."""
    specials = np.flatnonzero(is_special)
    if len(specials) and not text[ends[specials[-1]] :].strip():
        return int(specials[-1]) + 1
    return len(is_special)
