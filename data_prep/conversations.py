"""Reads the prompt source `conversations`: jsonl, json or parquet files or hub data sets, one conversation per row."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from mtptrain.data.questions import first_user_turn, question_group
from mtptrain.data.rows import ANY_SCHEMA, Row, RowFormat, parse_row, text_of
from mtptrain.data.tool_calls import Message

from .row_files import UsableRows


@dataclass
class Conversations(UsableRows):
    """Usable conversations, and why other rows were refused."""

    form: RowFormat = ANY_SCHEMA

    def messages(self, index: int) -> list[Message]:
        """Parses the row of a conversation again, because messages are not stored."""
        return parse_row(self.row(index), self.form)

    def question(self, index: int) -> str:
        """Returns the first user turn of a conversation; empty if there is none."""
        messages = self.messages(index)
        first = first_user_turn(messages)
        return "" if first is None else str(messages[first]["content"])


def read_conversations(paths: Sequence[str], form: RowFormat = ANY_SCHEMA, split: str = "train") -> Conversations:
    """Reads all files and data sets, and finds the usable conversations.

    Args:
        paths: see `UsableRows.add_all`, which also lists the errors.
        form: how rows are read. With schema `auto`, rows of different schemas may share a file.
        split: split of hub data sets.
    """

    def identify(row: Row) -> tuple[str, str]:
        messages = parse_row(row, form)
        return conversation_name(row, messages), question_group(messages)

    conversations = Conversations(form=form)
    conversations.add_all(paths, split, identify)
    return conversations


def conversation_name(row: Row, messages: Sequence[Message]) -> str:
    """Returns the row's `id` or `conversation_id`, or else a hash of its messages.

    The name does not affect the split into training and validation.

    Raises:
        ConversationRefused: the id is not valid Unicode.
    """
    for key in ("id", "conversation_id"):
        if row.get(key) not in (None, ""):
            return text_of("id", str(row[key]))
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
