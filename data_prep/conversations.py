"""Reads the prompt source `conversations`: jsonl, json or parquet files or hub data sets, one conversation per row."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.utils.logging import CRITICAL, set_verbosity

from mtptrain.config import ConversationSchema
from mtptrain.data.questions import question_group
from mtptrain.utils.files import parse_json

Message = dict[str, str]
Row = Mapping[str, Any]

COLUMNS = ("messages", "conversations", "conversation")
MESSAGE_KEYS = {ConversationSchema.messages: ("role", "content"), ConversationSchema.sharegpt: ("from", "value")}
ROLES = {
    ConversationSchema.messages: {role: role for role in ("system", "developer", "user", "assistant", "tool")},
    ConversationSchema.sharegpt: {
        "system": "system",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "assistant": "assistant",
    },
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message that may hold its reasoning separately from its content."""
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
CORRECT = "correct or remove it"


class ConversationRefused(ValueError):
    """Raised for a row that must be left out. Its message is the reason shown in the report."""


@dataclass(frozen=True)
class Rows:
    """The rows of one file or hub data set, with their line or row numbers."""

    path: str
    rows: Sequence[Row]
    numbers: Sequence[int]
    """Line number in a jsonl file, otherwise row number, from 1."""

    def location(self, index: int) -> str:
        return f"{self.path}:{self.numbers[index]}"

    def read(self) -> Iterator[tuple[int, Row]]:
        """Yields every row with its index.

        Raises:
            ValueError: a row cannot be decoded, for example because a text in a parquet file is not UTF-8.
        """
        try:
            yield from enumerate(self.rows)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: every row must be readable, but one is not ({error}); create the file again"
            ) from error


@dataclass(frozen=True)
class Conversations:
    """Usable rows, and why the others were refused."""

    names: list[str]
    refused: dict[str, str]
    schema: ConversationSchema
    origins: list[tuple[Rows, int]]
    groups: list[str]
    """Group of each usable row. Rows with the same question share a group, which stays in one split."""

    def messages(self, index: int) -> list[Message]:
        """Parses the row of a conversation again, because messages are not stored.

        Parquet files and hub data sets are memory-mapped. The rows of jsonl and json files are in memory.
        """
        rows, row = self.origins[index]
        return parse_row(rows.rows[row], self.schema)

    def location(self, index: int) -> str:
        rows, row = self.origins[index]
        return rows.location(row)


def read_conversations(
    paths: Sequence[str], schema: ConversationSchema = ConversationSchema.auto, split: str = "train"
) -> Conversations:
    """Reads all files and data sets, and finds the usable conversations.

    Args:
        paths: jsonl, json (one array) or parquet files, and names of data sets on the hub.
        schema: format of the messages; `auto` recognises it by the keys of each row's messages.
        split: split of hub data sets.

    Raises:
        FileNotFoundError: a path is neither a file nor a hub data set.
        ValueError: a path is given twice or is a directory, a file cannot be read or has another suffix than
            `FILE_SUFFIXES`, or its first row has an unknown schema.
    """
    refuse_duplicate_paths(paths)
    conversations = Conversations([], {}, schema, [], [])
    for rows in [_read_rows(path, split) for path in paths]:
        for index, row in rows.read():
            if index == 0:
                _check_schema(row, schema, rows.location(index))
            try:
                messages = parse_row(row, schema)
                conversations.names.append(conversation_name(row, messages))
                conversations.groups.append(question_group(messages))
                conversations.origins.append((rows, index))
            except ConversationRefused as refusal:
                conversations.refused[rows.location(index)] = str(refusal)
    return conversations


def refuse_duplicate_paths(paths: Sequence[str]) -> None:
    duplicates = [path for path, count in Counter(paths).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"prompts.paths: must name each path once, but names {', '.join(duplicates)} more than once; "
            "remove the duplicates"
        )


def conversation_name(row: Row, messages: Sequence[Message]) -> str:
    """Returns the row's `id` or `conversation_id`, or else a hash of its messages.

    The name does not affect the split into training and validation.

    Raises:
        ConversationRefused: the id is not valid Unicode.
    """
    for key in ("id", "conversation_id"):
        if row.get(key) not in (None, ""):
            return _unicode(str(row[key]))
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


def parse_row(row: Row, schema: ConversationSchema = ConversationSchema.auto) -> list[Message]:
    """Returns the messages of a row, with `role`, `content` and, if there is reasoning, `reasoning_content`.

    Raises:
        ConversationRefused: the row has no messages in a known schema, or something that is not rendered, such as tool
            calls.
    """
    listed = _message_column(row)
    if not listed:
        raise ConversationRefused("no messages")
    if row.get("tools") or any(isinstance(message, Mapping) and message.get("tool_calls") for message in listed):
        raise ConversationRefused("tools or tool calls, which are not rendered")
    row_schema = _schema_of(listed[0], schema)
    if row_schema is None:
        raise ConversationRefused("unknown schema")
    return [_parse_message(message, row_schema) for message in listed]


def _message_column(row: Row) -> Sequence[Any] | None:
    """Returns the column with the messages, or None if no such column is a list."""
    columns = (row[column] for column in COLUMNS if isinstance(row, Mapping) and column in row)
    return next((column for column in columns if isinstance(column, Sequence) and not isinstance(column, str)), None)


def _schema_of(message: Any, schema: ConversationSchema) -> ConversationSchema | None:
    candidates = MESSAGE_KEYS if schema is ConversationSchema.auto else {schema: MESSAGE_KEYS[schema]}
    fits = (
        name
        for name, keys in candidates.items()
        if isinstance(message, Mapping) and all(key in message for key in keys)
    )
    return next(fits, None)


def _parse_message(message: Any, schema: ConversationSchema) -> Message:
    if _schema_of(message, schema) is None:
        raise ConversationRefused("messages of different schemas")
    role_key, content_key = MESSAGE_KEYS[schema]
    role, content = message[role_key], message[content_key]
    if not isinstance(role, str) or role not in ROLES[schema]:
        raise ConversationRefused(f"unknown role {role!r}")
    if not isinstance(content, str):
        raise ConversationRefused(f"content must be text, but is {type(content).__name__}")
    reasoning = _reasoning(message) if ROLES[schema][role] == "assistant" else {}
    return {"role": ROLES[schema][role], "content": _unicode(content), **reasoning}


def _unicode(text: str) -> str:
    """Returns the text unchanged. Refuses lone surrogates, which JSON allows but tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConversationRefused("text that is not valid Unicode") from None
    return text


def _reasoning(message: Row) -> dict[str, str]:
    """Returns the reasoning of a message under `reasoning_content`, the key that chat templates read."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    if not isinstance(reasoning, str):
        raise ConversationRefused(f"reasoning must be text, but is {type(reasoning).__name__}")
    return {"reasoning_content": _unicode(reasoning)} if reasoning else {}


def _check_schema(row: Row, schema: ConversationSchema, location: str) -> None:
    """Raises ValueError if the first row of a file has an unknown format. Later rows like it are left out
    instead."""
    listed = _message_column(row) if isinstance(row, Mapping) else None
    if listed is not None and (not listed or _schema_of(listed[0], schema) is not None):
        return
    actual = f"keys {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    if listed is not None:
        actual += (
            f" and messages with {sorted(listed[0]) if isinstance(listed[0], Mapping) else type(listed[0]).__name__}"
        )
    known = " or ".join(f"`{name}` (messages with {', '.join(keys)})" for name, keys in MESSAGE_KEYS.items())
    raise ValueError(
        f"{location}: a row must hold its messages in a column {' or '.join(COLUMNS)}, in schema "
        f"{schema if schema != 'auto' else known}, but has {actual}; convert the data or correct prompts.schema"
    )


def _read_rows(path: str, split: str) -> Rows:
    suffix = Path(path).suffix
    if Path(path).is_dir():
        raise ValueError(
            f"prompts.paths: conversations must be files or hub data sets, but {path!r} is a directory; list its files"
        )
    if Path(path).is_file() and suffix not in FILE_SUFFIXES:
        raise ValueError(
            f"prompts.paths: files must end in {', '.join(FILE_SUFFIXES)}, but {path!r} does not; convert the file"
        )
    if Path(path).is_file():
        return {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[suffix](path)
    if suffix in FILE_SUFFIXES or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
        raise FileNotFoundError(
            f"prompts.paths: must name files or hub data sets, but {path!r} does not exist; correct the path"
        )
    return _read_hub(path, split)


def _read_jsonl(path: str) -> Rows:
    numbered = list(_json_lines(path))
    return Rows(path, [row for _, row in numbered], [number for number, _ in numbered])


def _json_lines(path: str) -> Iterator[tuple[int, Row]]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_json(line, f"{path}:{number}", CORRECT)


def _read_json(path: str) -> Rows:
    content = parse_json(Path(path).read_bytes(), path, CORRECT)
    if not isinstance(content, list):
        raise ValueError(
            f"{path}: must hold one array of conversations, but holds a {type(content).__name__}; convert it to jsonl"
        )
    return Rows(path, content, range(1, len(content) + 1))


def _read_parquet(path: str) -> Rows:
    set_verbosity(CRITICAL)  # datasets would also log the error that is raised here
    try:
        rows = Dataset.from_parquet(path)
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip()
        raise ValueError(
            f"{path}: must be a parquet file with rows, but cannot be read ({reason}); create it again"
        ) from error
    return Rows(path, rows, range(1, len(rows) + 1))


def _read_hub(name: str, split: str) -> Rows:
    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"prompts.paths: must name files or hub data sets, but {name!r} is not a file, and its split {split!r} "
            f"cannot be loaded from the hub: {str(error).splitlines()[0]}; correct prompts.paths and prompts.split, "
            "or download it as parquet"
        ) from error
    return Rows(name, rows, range(1, len(rows) + 1))
