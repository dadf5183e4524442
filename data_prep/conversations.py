"""Reads rows from jsonl, json and parquet files and data sets on the hub, and finds the usable conversations."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from datasets.utils.logging import CRITICAL, set_verbosity
from transformers import PreTrainedTokenizerBase

from mtptrain.data.conversation import ConversationRefused, Message, first_user_turn, question_group
from mtptrain.data.rows import ANY_SCHEMA, ID_COLUMNS, Row, RowFormat, parse_row, text_of
from mtptrain.data.tool_calls import without_filled_nulls
from mtptrain.target.hub import HUB_ERRORS
from mtptrain.utils.errors import UserError, reason_of
from mtptrain.utils.files import parse_json

from .prompts_report import group_refusals
from .renderings import EncodedItem, RenderedConversation, encode_conversations, render_conversation

CORRECT = "correct or remove it"
REASONS_SHOWN = 3
BLANK: Row = {}
"""Stands for an empty line of a jsonl file, so that the index of a row is that of its line."""


@dataclass
class Source:
    """Usable rows of `prompts.paths`, each one item of the prompts, and why the others were refused.

    Only what names a row is kept, and the row is read again when it is needed. Parquet files and hub data sets are
    memory-mapped; the rows of jsonl and json files are in memory.
    """

    form: RowFormat = ANY_SCHEMA
    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    """Group of each usable row. Rows with the same question share a group, which stays in one split."""
    origins: list[tuple[str, Sequence[Row], int]] = field(default_factory=list)
    """Path, rows of the path and index of each usable row."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a row cannot be used, by its location."""
    passed_over: set[str] = field(default_factory=set)
    """Names of columns and message keys that are not read."""

    def identify(self, row: Row) -> tuple[str, str, set[str]]:
        """Returns the name and the group of a row that can be used, and the names of what is passed over."""
        raise NotImplementedError

    def encode(self, tokenizer: PreTrainedTokenizerBase, indices: Sequence[int]) -> list[EncodedItem | str]:
        """Returns the documents of each of these items, or the reason for refusing it."""
        raise NotImplementedError

    def row(self, index: int) -> Row:
        return _row(*self.origins[index])

    def location(self, index: int) -> str:
        path, _, row = self.origins[index]
        return f"{path}:{row + 1}"

    def add_all(self, paths: Sequence[str], split: str) -> Self:
        """Reads the rows of all jsonl, json (one array) and parquet files and of this split of data sets on the hub."""
        for path, rows in [(path, _read_rows(path, split)) for path in dict.fromkeys(paths)]:
            refused: dict[str, str] = {}
            num_before = len(self.names)
            for index in range(len(rows)):
                row = _row(path, rows, index)
                if row is BLANK:
                    continue
                try:
                    name, group, passed_over = self.identify(row)
                except ConversationRefused as refusal:
                    refused[f"{path}:{index + 1}"] = str(refusal)
                    continue
                self.names.append(name)
                self.groups.append(group)
                self.origins.append((path, rows, index))
                self.passed_over |= passed_over
            if len(self.names) == num_before:
                groups = group_refusals(refused)[:REASONS_SHOWN]
                reasons = "".join(f", {group.count:,} refused ({group.reason})" for group in groups)
                raise UserError(
                    f"prompts.paths: every file must hold at least one usable row, but {path} holds none of "
                    f"{len(refused):,}{reasons}; convert the data, or correct prompts.source, prompts.paths, "
                    "prompts.schema or prompts.roles"
                )
            self.refused.update(refused)
        return self


class Conversations(Source):
    """Conversations in the target's chat template, in which everything that the assistant generates is supervised."""

    def identify(self, row: Row) -> tuple[str, str, set[str]]:
        messages, passed_over = parse_row(row, self.form)
        return conversation_name(row, messages), question_group(messages), passed_over

    def messages(self, index: int) -> list[Message]:
        return parse_row(self.row(index), self.form)[0]

    def question(self, index: int) -> str:
        """Returns the first user turn of a conversation; empty if there is none."""
        messages = self.messages(index)
        first = first_user_turn(messages)
        return "" if first is None else messages[first]["content"]

    def render(self, tokenizer: PreTrainedTokenizerBase, index: int) -> RenderedConversation:
        return render_conversation(tokenizer, self.messages(index))

    def encode(self, tokenizer: PreTrainedTokenizerBase, indices: Sequence[int]) -> list[EncodedItem | str]:
        rendered: dict[int, RenderedConversation] = {}
        items: dict[int, EncodedItem | str] = {}
        for index in indices:
            try:
                rendered[index] = self.render(tokenizer, index)
            except ConversationRefused as refusal:
                items[index] = str(refusal)
        items.update(zip(rendered, encode_conversations(tokenizer, list(rendered.values())), strict=True))
        return [items[index] for index in indices]


def read_conversations(paths: Sequence[str], form: RowFormat = ANY_SCHEMA, split: str = "train") -> Conversations:
    return Conversations(form).add_all(paths, split)


def conversation_name(row: Row, messages: Sequence[Message]) -> str:
    """Returns the row's `id` or `conversation_id`, or else a hash of its messages. It does not affect the split."""
    for key in ID_COLUMNS:
        if row.get(key) not in (None, ""):
            return text_of("id", str(row[key]))
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


def _row(path: str, rows: Sequence[Row], index: int) -> Row:
    """Returns a row, without the nulls that parquet fills into tools and calls."""
    try:
        return without_filled_nulls(rows[index]) if isinstance(rows, Dataset) else rows[index]
    except ValueError as error:
        raise UserError(
            f"{path}: every row must be readable, but one is not ({error}); create the file again"
        ) from error


def _read_rows(path: str, split: str) -> Sequence[Row]:
    reader = READERS.get(Path(path).suffix)
    if reader is not None and Path(path).is_file():
        return reader(path)
    if reader is not None or Path(path).exists():
        raise UserError(
            f"prompts.paths: must name {', '.join(READERS)} files or hub data sets, but {path!r} is neither; correct "
            "the path, list the files of a directory, or convert the file"
        )
    return _read_hub(path, split)


def _read_jsonl(path: str) -> Sequence[Row]:
    with Path(path).open("rb") as file:
        return [
            parse_json(line, f"{path}:{number}", CORRECT) if line.strip() else BLANK
            for number, line in enumerate(file, start=1)
        ]


def _read_json(path: str) -> Sequence[Row]:
    content = parse_json(Path(path).read_bytes(), path, CORRECT)
    if not isinstance(content, list):
        raise UserError(f"{path}: must hold one array of rows, but holds {type(content).__name__}; convert it to jsonl")
    return content


def _read_parquet(path: str) -> Sequence[Row]:
    set_verbosity(CRITICAL)  # datasets would also log the error that is raised here
    try:
        rows: Sequence[Row] = Dataset.from_parquet(path)
        return rows
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip()
        raise UserError(
            f"{path}: must be a parquet file with rows, but cannot be read ({reason}); create it again"
        ) from error


READERS: dict[str, Callable[[str], Sequence[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_hub(name: str, split: str) -> Sequence[Row]:
    try:
        rows: Sequence[Row] = load_dataset(name, split=split)
        return rows
    except (*HUB_ERRORS, ValueError, RuntimeError, DatasetsError) as error:  # RuntimeError: a data set that is a script
        raise UserError(
            f"prompts.paths: must name files or hub data sets, but {name!r} is not a file, and its split {split!r} "
            f"cannot be loaded from the hub: {reason_of(error)}; correct prompts.paths and prompts.split, log in with "
            "`hf auth login` if the data set is gated or private, or download it as parquet"
        ) from error
