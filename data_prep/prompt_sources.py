"""Gives every prompt source the same interface: named files, conversations or rows of tokens, encoded on demand."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PromptsConfig, PromptSource
from mtptrain.data.conversation import ConversationRefused, short_hash
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.row_files import Row
from mtptrain.data.rows import ID_COLUMNS, RowFormat, given_columns, pass_over
from mtptrain.data.text_files import read_text_files
from mtptrain.data.traces import documents_of, find_episodes, is_written, read_calls
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError

from .conversations import Source, read_conversations, row_at, row_name
from .near_duplicates import join_near_duplicates
from .renderings import EncodedItem, Encoding, check_chat_template
from .responses.store import read_responses

NOT_WRITTEN = "token ids that do not give the texts of the trace, as those of another tokenizer do"


def read_source(prompts: PromptsConfig, target: TargetFiles, responses_dir: Path) -> tuple[Source, list[str]]:
    """Returns the usable items of `prompts.paths`, and the name of each one's cluster, all of which go to one split."""
    if not prompts.paths:
        raise UserError(
            f"prompts.paths: must name at least one path with prompts.source={prompts.source}, but is empty; set "
            "prompts.paths=[...] in the recipe or on the command line"
        )
    if prompts.source is PromptSource.tokens:
        rows = TokenRows(RowFormat.of(prompts), tokenizer=target.tokenizer).add_all(prompts.paths, prompts.split)
        rows.join_episodes()
        return rows, rows.groups
    if prompts.source is PromptSource.text_files:
        texts = Texts(*read_text_files(prompts.paths, prompts.pattern, prompts.exclude))
        return texts, texts.groups
    check_chat_template(target.tokenizer)
    conversations = (
        read_responses(responses_dir, prompts, TargetIdentity.of(target))
        if prompts.source is PromptSource.responses
        else read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    )
    groups, similarity = conversations.groups, prompts.near_duplicate_similarity
    return conversations, join_near_duplicates(groups, conversations.question, similarity) if similarity < 1 else groups


class Texts(Source):
    """Whole files with text, after a beginning-of-text token if there is one; every token is supervised."""

    def __init__(self, texts: Mapping[str, str], refused: Mapping[str, str]) -> None:
        names = [name for name, text in texts.items() if text]
        super().__init__(names=names, groups=names)
        self.refused = {**refused, **{name: "empty" for name, text in texts.items() if not text}}
        self._texts = texts

    def location(self, index: int) -> str:
        return self.names[index]

    def encode(self, tokenizer: PreTrainedTokenizerBase, indices: Sequence[int]) -> list[EncodedItem | str]:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        texts = [self._texts[self.names[i]] for i in indices]
        batch = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [EncodedItem([Encoding(ids, np.ones(len(ids), np.uint8))]) for ids in documents]


@dataclass(kw_only=True)
class TokenRows(Source):
    """Rows that somebody else has tokenized, each with the loss mask that says what is supervised, and traces."""

    tokenizer: PreTrainedTokenizerBase
    _read: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    """What `find_episodes` needs of each usable row."""
    _later: list[list[tuple[str, Sequence[Row], int]]] = field(default_factory=list)
    """The further rows of the episode of each item."""

    def identify(self, row: Row) -> tuple[str, str, set[str]]:
        # Answers to one prompt stay together: a group is named by the tokens before the first supervised one, if any.
        if (calls := read_calls(row) if isinstance(row, Mapping) else None) is not None:
            if self.form.drop_failed and row.get("ok") is False:
                raise ConversationRefused("a run that failed, which prompts.drop_failed leaves out")
            if not all(is_written(call, self.tokenizer) for call in calls):
                raise ConversationRefused(NOT_WRITTEN)
            name, asked = row_name(row, json.dumps(calls).encode()), row.get("session_id") or calls[0].prompt
            if row.get("event") == "request.finished":  # of SGLang
                asked = row["obj"].get("session_id") or asked
            first, documents = np.array(calls[0].prompt, np.int32), [ids.tobytes() for ids, *_ in documents_of(calls)]
            self._read.append((first.tobytes(), documents))
            return name, short_hash(json.dumps(asked).encode()), set()
        encoding, passed_over = read_tokens(row, self.form.metadata)
        ids, num_asked = encoding.input_ids, int(encoding.loss_mask.argmax())
        name = row_name(row, ids.tobytes())
        self._read.append((b"", []))
        return name, short_hash(ids[: num_asked or None].tobytes()), passed_over

    def encode(self, tokenizer: PreTrainedTokenizerBase, indices: Sequence[int]) -> list[EncodedItem | str]:
        return [self._encode(index) for index in indices]

    def _encode(self, index: int) -> EncodedItem:
        if (calls := read_calls(row := self.row(index))) is None:
            return EncodedItem([read_tokens(row, self.form.metadata)[0]])
        calls += [call for later in self._later[index] for call in read_calls(row_at(*later)) or ()]
        return EncodedItem([Encoding(*document) for document in documents_of(calls)])

    def join_episodes(self) -> None:
        """Makes the rows of an episode one item. Raises UserError if most rows are of another tokenizer."""
        if (num_wrong := [*self.refused.values()].count(NOT_WRITTEN)) > len(self.names):
            raise UserError(
                f"prompts.paths: token ids must be of the target's tokenizer, but {num_wrong:,} rows, more than can be "
                f"used, have {NOT_WRITTEN}; set target.path to the model that wrote them, or leave these rows out"
            )
        episodes = find_episodes(self._read)
        self._later = [[self.origins[index] for index in later] for _, *later in episodes]
        self.num_joined = sum(map(len, self._later))
        self.names, self.groups = [self.names[i] for i, *_ in episodes], [self.groups[i] for i, *_ in episodes]
        self.origins = [self.origins[i] for i, *_ in episodes]


def read_tokens(row: Row, metadata: Collection[str] = ()) -> tuple[Encoding, set[str]]:
    """Returns the token ids and the loss mask of a row, and the names of columns that are passed over."""
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
