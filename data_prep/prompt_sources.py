"""Gives every prompt source the same interface: named files, conversations or rows of tokens, encoded on demand."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PromptsConfig, PromptSource
from mtptrain.data.chat_template import special_tokens
from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.rows import ID_COLUMNS, Row, RowFormat, given_columns, pass_over, text_of
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError

from .conversations import Conversations, UsableRows, read_conversations
from .near_duplicates import join_near_duplicates
from .renderings import (
    EncodedItem,
    Encoding,
    RenderedConversation,
    check_chat_template,
    encode_conversations,
    render_conversation,
)
from .responses.dialogue import Ending
from .responses.store import read_responses
from .text_files import read_text_files


@dataclass(frozen=True)
class Source:
    """The items of `prompts.paths`: files, conversations or rows of tokens."""

    names: list[str]
    groups: list[str]
    """Name of each item's group. The items of a group have the same question."""
    clusters: list[str]
    """Name of each item's cluster of near-duplicate groups. All items of a cluster go to one split."""
    refused: dict[str, str]
    """Why an item is not in `names`, by location."""
    location: Callable[[int], str]
    """Returns where an item comes from, for messages."""
    encode: Callable[[Sequence[int]], list[EncodedItem | str]]
    """Returns the documents of each of these items, or the reason for refusing it."""
    passed_over: set[str] = field(default_factory=set)
    """Names of columns and message keys that are not read."""


def read_source(prompts: PromptsConfig, target: TargetFiles, responses_dir: Path) -> Source:
    """Find the usable documents of `prompts.paths`.

    Args:
        prompts: the settings.
        target: the target, which must have generated the responses.
        responses_dir: output of mtptrain responses, which replaces the conversations of the paths if the source is
            `responses`.
    """
    if not prompts.paths:
        raise UserError(
            f"prompts.paths: must name at least one path with prompts.source={prompts.source}, but is empty; set "
            "prompts.paths=[...] in the recipe or on the command line"
        )
    if prompts.source is PromptSource.tokens:
        rows = TokenRows(RowFormat.of(prompts)).add_all(prompts.paths, prompts.split)
        return source_of(rows, rows.groups, rows.encode)
    tokenizer = target.tokenizer
    if prompts.source is PromptSource.text_files:
        return encoded_texts(*read_text_files(prompts.paths, prompts.pattern, prompts.exclude), tokenizer)
    check_chat_template(tokenizer)
    if are_generated := prompts.source is PromptSource.responses:
        conversations = read_responses(responses_dir, prompts, TargetIdentity.of(target))
    else:
        conversations = read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    clusters, similarity = conversations.groups, prompts.near_duplicate_similarity
    if similarity < 1.0:
        clusters = join_near_duplicates(conversations.groups, conversations.question, similarity)
    return source_of(conversations, clusters, partial(encode_chats, tokenizer, conversations, are_generated))


def source_of(
    rows: UsableRows, clusters: list[str], encode: Callable[[Sequence[int]], list[EncodedItem | str]]
) -> Source:
    return Source(rows.names, rows.groups, clusters, rows.refused, rows.location, encode, rows.passed_over)


def encoded_texts(texts: dict[str, str], refused: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> Source:
    """Returns whole files with text, after a beginning-of-text token if there is one; every token is supervised."""
    names = [name for name, text in texts.items() if text]
    refused = refused | {name: "empty" for name, text in texts.items() if not text}
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(indices: Sequence[int]) -> list[EncodedItem | str]:
        batch = tokenizer([texts[names[i]] for i in indices], add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [EncodedItem([Encoding(ids, np.ones(len(ids), np.uint8))]) for ids in documents]

    return Source(names, names, names, refused, names.__getitem__, encode)


class TokenRows(UsableRows):
    """Rows that somebody else has tokenized, each with the loss mask that says what is supervised."""

    def identify(self, row: Row) -> tuple[str, str, set[str]]:
        """See `UsableRows.identify`.

        A row's group is the hash of its tokens before the first supervised one, or of all if that comes first, so
        answers to one prompt stay together.
        """
        encoding, passed_over = read_tokens(row, self.form.metadata)
        ids, name = encoding.input_ids, row.get("id")
        asked = ids[: encoding.loss_mask.argmax()]
        name = _hash(ids) if name in (None, "") else text_of("id", str(name))
        return name, _hash(asked if len(asked) else ids), passed_over

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        return [EncodedItem([read_tokens(self.row(index), self.form.metadata)[0]]) for index in indices]


def read_tokens(row: Row, metadata: Collection[str] = ()) -> tuple[Encoding, set[str]]:
    """Returns the token ids and the loss mask of a row, and the names of columns that are passed over.

    Args:
        row: the columns of the row.
        metadata: names of columns that only describe a row.
    """
    columns = given_columns(row, metadata)
    ids = _numbers("input_ids", columns, 2**31 - 1)
    mask = _numbers("loss_mask", columns, 1)
    seen = _numbers("attention_mask", columns, 1) if "attention_mask" in columns else np.ones_like(ids)
    if not len(ids) == len(mask) == len(seen):
        raise ConversationRefused("input_ids and masks of different lengths")
    if not seen.all():
        raise ConversationRefused("an attention_mask with zeros, which is not read: leave out the padding")
    if not mask.any():
        raise ConversationRefused("a loss_mask that selects no token")
    others = {name: columns[name] for name in columns.keys() - {"input_ids", "loss_mask", "attention_mask"}}
    return Encoding(ids.astype(np.int32), mask.astype(np.uint8)), pass_over("column", others) - {*ID_COLUMNS}


def _numbers(name: str, columns: Mapping[str, Any], most: int) -> NDArray[np.int64]:
    """Returns a column [S] of whole numbers, or of booleans, from 0 to `most`."""
    if name not in columns:
        raise ConversationRefused(f"no column {name}, but {', '.join(sorted(columns)) or 'none'}")
    values = columns[name]
    if not isinstance(values, list) or not all(isinstance(value, int) and 0 <= value <= most for value in values):
        raise ConversationRefused(f"{name} must be a list of whole numbers from 0 to {most:,}, but is not")
    return np.array(values, np.int64)


def _hash(ids: NDArray[np.int32]) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()[:16]


def encode_chats(
    tokenizer: PreTrainedTokenizerBase, conversations: Conversations, are_generated: bool, indices: Sequence[int]
) -> list[EncodedItem | str]:
    """Returns the documents of conversations in the target's chat template; what the assistant generates is supervised.

    Of responses that the target generated (`are_generated`), the loss mask leaves out those that the template does not
    render as generated, and the end-of-turn token that the template adds after a response that was cut off.
    """
    rendered: dict[int, RenderedConversation] = {}
    items: dict[int, EncodedItem | str] = {}
    for index in indices:
        messages = conversations.messages(index)
        try:
            if are_generated:
                rendered[index] = _render_responses(tokenizer, messages, conversations.row(index)["texts_kept"])
            else:
                rendered[index] = render_conversation(tokenizer, messages)
        except ConversationRefused as refusal:
            items[index] = str(refusal)
    special_ids = list(special_tokens(tokenizer))
    for index, item in zip(rendered, encode_conversations(tokenizer, list(rendered.values())), strict=True):
        items[index] = item
        row = conversations.row(index) if are_generated else {}
        if row.get("ended_by") == Ending.length and row["texts_kept"][-1]:
            whole = item.encodings[0]  # contains the last response
            last = np.flatnonzero(whole.loss_mask)[-1:]
            whole.loss_mask[last] = ~np.isin(whole.input_ids[last], special_ids)
    return [items[index] for index in indices]


def _render_responses(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], are_kept: Sequence[bool]
) -> RenderedConversation:
    """Renders a conversation of which the target generated the responses. Those that are not `are_kept` are history."""
    if are_kept and not any(are_kept):
        raise ConversationRefused("the chat template renders no answer as it was generated")
    answers = [message for message in messages if message["role"] == "assistant"]
    for message, is_kept in zip(answers, are_kept, strict=True):
        if not is_kept:
            message["weight"] = "0"
    rendered = render_conversation(tokenizer, messages, is_generated=True)
    return replace(rendered, trained=len(answers), untrained=0)
