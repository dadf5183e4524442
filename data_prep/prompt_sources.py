"""Gives every prompt source the same interface: named files, conversations or rows of tokens, encoded on demand."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PromptsConfig, PromptSource
from mtptrain.data.chat_template import special_tokens
from mtptrain.data.conversation import ConversationRefused
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


class Source(Protocol):
    names: list[str]
    groups: list[str]
    """Name of each item's group. The items of a group have the same question."""
    clusters: list[str]
    """Name of each item's cluster of near-duplicate groups. All items of a cluster go to one split."""
    refused: dict[str, str]
    """Why an item is not in `names`, by location."""
    passed_over: set[str]
    """Names of columns and message keys that are not read."""

    def location(self, index: int) -> str:
        """Returns where item `index` comes from, for messages."""

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        """Returns the documents of each item, or the reason for refusing it."""


class TextSource:
    """Whole files with text, after a beginning-of-text token if the tokenizer has one; every token is supervised."""

    def __init__(self, texts: dict[str, str], refused: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = self.groups = self.clusters = [name for name, text in texts.items() if text]
        self.refused = refused | {name: "empty" for name, text in texts.items() if not text}
        self.passed_over: set[str] = set()
        self._texts = [texts[name] for name in self.names]
        self._tokenizer = tokenizer

    def location(self, index: int) -> str:
        return self.names[index]

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        texts = [self._texts[i] for i in indices]
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        batch = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [EncodedItem([Encoding(ids, np.ones(len(ids), np.uint8))]) for ids in documents]


class TokenSource(UsableRows):
    """Rows that somebody else has tokenized, each with the loss mask that says what is supervised.

    A row's group is the hash of its tokens before the first supervised one, or of all if that comes first, so answers
    to one prompt stay together.
    """

    def __init__(self, paths: Sequence[str], metadata: Collection[str], split: str) -> None:
        """Reads all files and data sets. See `UsableRows.add_all` for errors, and `read_tokens` for `metadata`."""
        super().__init__()
        self.clusters = self.groups
        self._metadata = metadata
        self.add_all(paths, split, self._identify)

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        return [EncodedItem([read_tokens(self.row(index), self._metadata)[0]]) for index in indices]

    def _identify(self, row: Row) -> tuple[str, str]:
        encoding, passed_over = read_tokens(row, self._metadata)
        self.passed_over |= passed_over
        ids, name = encoding.input_ids, row.get("id")
        asked = ids[: encoding.loss_mask.argmax()]
        return _hash(ids) if name in (None, "") else text_of("id", str(name)), _hash(asked if len(asked) else ids)


def read_tokens(row: Row, metadata: Collection[str] = ()) -> tuple[Encoding, set[str]]:
    """Returns the token ids and the loss mask of a row, and the names of columns that are passed over.

    Args:
        row: the columns of the row.
        metadata: names of columns that only describe a row.

    Raises:
        ConversationRefused: the row lacks one of them, their lengths differ, a value is out of range, no token is
            supervised, or a further column cannot be passed over.
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
    others = {
        name: value for name, value in columns.items() if name not in ("input_ids", "loss_mask", "attention_mask")
    }
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


class ConversationSource:
    """Conversations in the target's chat template; the tokens that the assistant generates are supervised."""

    def __init__(
        self, conversations: Conversations, tokenizer: PreTrainedTokenizerBase, near_duplicate_similarity: float
    ) -> None:
        self.names = conversations.names
        self.groups = self.clusters = conversations.groups
        if near_duplicate_similarity < 1.0:
            self.clusters = join_near_duplicates(self.groups, conversations.question, near_duplicate_similarity)
        self.refused, self.passed_over = conversations.refused, conversations.passed_over
        self.location = conversations.location
        self._conversations = conversations
        self._tokenizer = tokenizer

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        rendered: dict[int, RenderedConversation] = {}
        refused: dict[int, str] = {}
        for index in indices:
            try:
                rendered[index] = self._render(index)
            except ConversationRefused as refusal:
                refused[index] = str(refusal)
        encoded = dict(zip(rendered, encode_conversations(self._tokenizer, list(rendered.values())), strict=True))
        return [encoded[index] if index in encoded else refused[index] for index in indices]

    def _render(self, index: int) -> RenderedConversation:
        return render_conversation(self._tokenizer, self._conversations.messages(index))


class ResponsesSource(ConversationSource):
    """Conversations that mtptrain responses has regenerated.

    The loss mask leaves out responses that the template does not render as generated, and the end-of-turn token that
    the template adds after a response that was cut off.
    """

    def encode(self, indices: Sequence[int]) -> list[EncodedItem | str]:
        special_ids = list(special_tokens(self._tokenizer))
        items = super().encode(indices)
        for index, item in zip(indices, items, strict=True):
            row = self._conversations.row(index)
            if row["ended_by"] == Ending.length and row["texts_kept"][-1] and not isinstance(item, str):
                whole = item.encodings[0]  # contains the last response
                last = np.flatnonzero(whole.loss_mask)[-1:]
                whole.loss_mask[last] = ~np.isin(whole.input_ids[last], special_ids)
        return items

    def _render(self, index: int) -> RenderedConversation:
        is_kept = self._conversations.row(index)["texts_kept"]
        if is_kept and not any(is_kept):
            raise ConversationRefused("the chat template renders no answer as it was generated")
        messages = self._conversations.messages(index)
        answers = [message for message in messages if message["role"] == "assistant"]
        for message, kept in zip(answers, is_kept, strict=True):
            if not kept:
                message["weight"] = "0"
        rendered = render_conversation(self._tokenizer, messages, is_generated=True)
        return replace(rendered, trained=len(answers), untrained=0)


def read_source(prompts: PromptsConfig, target: TargetFiles, responses_dir: Path) -> Source:
    """Find the usable documents of `prompts.paths`.

    Args:
        prompts: the settings.
        target: the target, which must have generated the responses.
        responses_dir: output of mtptrain responses, which replaces the conversations of the paths if the source is
            `responses`.

    Raises:
        UserError: no path is given; with source `responses`: mtptrain responses has not finished, or the responses are
            those of another target or of other `prompts.paths`; with any other source: a path does not exist or a file
            has an unknown format; with conversations or responses: the chat template cannot be used.
    """
    if not prompts.paths:
        raise UserError(
            f"prompts.paths: must name at least one path with prompts.source={prompts.source}, but is empty; set "
            "prompts.paths=[...] in the recipe or on the command line"
        )
    if prompts.source is PromptSource.tokens:
        return TokenSource(prompts.paths, prompts.metadata, prompts.split)
    tokenizer, similarity = target.tokenizer, prompts.near_duplicate_similarity
    if not prompts.source.is_chat:
        return TextSource(*read_text_files(prompts.paths, prompts.pattern, prompts.exclude), tokenizer)
    check_chat_template(tokenizer)
    if prompts.source is PromptSource.responses:
        return ResponsesSource(read_responses(responses_dir, prompts, TargetIdentity.of(target)), tokenizer, similarity)
    conversations = read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    return ConversationSource(conversations, tokenizer, similarity)
