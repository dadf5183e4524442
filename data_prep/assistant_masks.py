"""Tokenizes rendered conversations, and makes loss masks that select the tokens that the assistant generates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import render_text, require_chat_template

from .renderings import Rendering, render_conversation
from .rows import ConversationRefused, Message

_PROBE: list[Message] = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]


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
    """See `Rendering.answers_left_out`."""


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a short conversation, to find errors before processing the data.

    Raises:
        ValueError: the chat template is missing or fails, the tokenizer cannot map tokens to characters, or the mask of
            the assistant turn is empty.
        EndlessTemplate: the template takes too long.
    """
    require_chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise ValueError(
            "target.path: loss masks must be made with a fast tokenizer (tokenizer.json), but "
            f"{tokenizer.name_or_path} has a slow one; convert it"
        )
    try:
        render_text(tokenizer, _PROBE)
    except TemplateError as error:
        raise ValueError(
            f"target.path: the chat template of {tokenizer.name_or_path} must render a question and its answer, but "
            f"for the test conversation {_PROBE[0]['content']!r} it reports: {' '.join(str(error).split())}; correct "
            "the template in the target's directory, or choose another target"
        ) from error
    try:
        [encoding] = encode_renderings(tokenizer, render_conversation(tokenizer, _PROBE))
    except ConversationRefused as refusal:
        raise empty_mask_error(tokenizer, str(refusal)) from refusal
    if not encoding.loss_mask.any():
        raise empty_mask_error(tokenizer, "its {% generation %} block contains no text of an assistant message")


def empty_mask_error(tokenizer: PreTrainedTokenizerBase, reason: str) -> ValueError:
    """Returns the error for loss masks that select no token, from which training would learn nothing."""
    return ValueError(
        f"target.path: the chat template of {tokenizer.name_or_path} must show which tokens the assistant generates, "
        f"but the loss mask is empty: {reason}; correct the template ({{% generation %}} ... {{% endgeneration %}} "
        "around a response) or the data"
    )


def encode_renderings(tokenizer: PreTrainedTokenizerBase, renderings: Sequence[Rendering]) -> list[Encoding]:
    """Returns token ids and loss masks of texts that already contain all special tokens."""
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
        encodings.append(Encoding(input_ids, mask, rendering.turn, rendering.answers, rendering.answers_left_out))
    return encodings


def _loss_mask(rendering: Rendering, offsets: NDArray[np.int64], is_special: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Returns the mask [S] of tokens in the spans. `offsets` [S, 2] are the characters [start, end) of each token.

    A token that begins before a span and ends inside it also contains the end of the prompt, so the assistant cannot
    have generated it.
    """
    mask = np.zeros(len(offsets), np.uint8)
    ends = offsets[:, 1]
    # Some tokenizers exclude the leading space of a token from its offsets.
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
    for start, end in rendering.spans:
        inside = np.flatnonzero((starts >= start) & (starts < end))
        mask[inside[: _num_generated(rendering.text[:end], ends[inside], is_special[inside])]] = 1
    return mask


def _num_generated(text: str, ends: NDArray[np.int64], is_special: NDArray[np.bool_]) -> int:
    """Returns the number of generated tokens in a span, not counting white space after the end-of-turn token."""
    specials = np.flatnonzero(is_special)
    if len(specials) and not text[ends[specials[-1]] :].strip():
        return int(specials[-1]) + 1
    return len(is_special)
