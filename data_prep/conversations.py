"""Reads rows from JSON and parquet files and data sets on the hub, and finds the usable conversations."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from datasets import Dataset, DownloadManager, Json, LargeList, List, ReadInstruction, load_dataset_builder
from datasets.exceptions import DatasetGenerationError, DatasetsError
from datasets.utils.logging import CRITICAL, set_verbosity
from transformers import PreTrainedTokenizerBase

from mtptrain.data.conversation import ConversationRefused, Message, first_user_turn, question_group, short_hash
from mtptrain.data.prompt_files import describe_refusals, group_refusals
from mtptrain.data.row_files import BLANK, SUFFIXES, Row, read_json_rows
from mtptrain.data.rows import ANY_SCHEMA, ID_COLUMNS, TEXT_NAMES, RowFormat, parse_row, text_of
from mtptrain.data.tool_calls import CALL_KEYS, TOOL_COLUMNS
from mtptrain.target.hub import HUB_ERRORS
from mtptrain.utils.errors import UserError, error_summary, warn

from .renderings import EncodedItem, RenderedConversation, encode_conversations, render_conversation

PARQUET = ".parquet"
JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
QUOTED = "all texts in the quotes of JSON, which datasets adds where a column holds values of unlike types"
MOST_QUOTED = 0.01
"""Share of a file's rows that may be refused for such quotes. With more, all others are suspect too."""
REREAD = "name the JSON files from which it was made, or write it again from them with columns of plain text"


@dataclass
class Source:
    """Usable rows of `prompts.paths`, each one item of the prompts, and why the others were refused.

    Only what names a row is kept, and the row is read again when it is needed. Parquet files and other hub
    data sets are memory-mapped; the rows of JSON are in memory.
    """

    form: RowFormat = ANY_SCHEMA
    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    """Group of each usable row. Rows with the same question share a group, which stays in one split."""
    origins: list[tuple[str, Sequence[Row], int]] = field(default_factory=list)
    """Path, rows of the path and index of each usable row."""
    num_joined: int = 0
    """Number of rows that are parts of items of other rows."""
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
        return row_at(*self.origins[index])

    def location(self, index: int) -> str:
        path, _, row = self.origins[index]
        return f"{path}:{row + 1}"

    def add_all(self, paths: Sequence[str], split: str) -> Self:
        """Reads the rows of all JSON and parquet files and of this split of data sets on the hub."""
        for path, rows in [(path, _read_rows(path, split)) for path in dict.fromkeys(paths)]:
            refused: dict[str, str] = {}
            num_before = len(self.names)
            for index in range(len(rows)):
                row = row_at(path, rows, index)
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
                said = describe_refusals(len(refused), group_refusals(refused))
                raise UserError(
                    f"{path}: {said}; every file must hold at least one usable row: convert the data, or correct "
                    "prompts.source, prompts.paths, prompts.schema or prompts.roles"
                )
            quoted = [location for location, reason in refused.items() if reason == QUOTED]
            if len(quoted) > max(1, MOST_QUOTED * len(rows)):
                raise UserError(
                    f"{quoted[0]}: a row must hold its texts as they were written, but holds, as {len(quoted):,} rows "
                    f"of {len(rows):,} do, {QUOTED}; {REREAD}"
                )
            self.refused.update(refused)
        return self


class Conversations(Source):
    """Conversations in the target's chat template, in which everything that the assistant generates is supervised."""

    def identify(self, row: Row) -> tuple[str, str, set[str]]:
        messages, passed_over = parse_row(row, self.form)
        texts = [each["content"] for each in messages if each["role"] in ("user", "assistant")]
        if len(texts) > 1 and all(map(JSON_TEXT.fullmatch, filter(None, texts))):
            raise ConversationRefused(QUOTED)
        return row_name(row, json.dumps(messages).encode()), question_group(messages), passed_over

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


def row_name(row: Row, content: bytes) -> str:
    """Returns the row's `id` or `conversation_id`, or else a hash of its content. It does not affect the split."""
    given = [str(row[key]) for key in ID_COLUMNS if row.get(key) not in (None, "")]
    return text_of("id", given[0]) if given else short_hash(content)


def row_at(path: str, rows: Sequence[Row], index: int) -> Row:
    """Returns a row, without the nulls that parquet fills into tools and calls."""
    try:
        row = rows[index]
    except ValueError as error:
        raise UserError(
            f"{path}: every row must be readable, but one is not ({error}); create the file again"
        ) from error
    if not isinstance(rows, Dataset):
        return row
    return {name: _as_written(value, rows.features[name], name, path) for name, value in row.items()}


def _as_written(value: Any, feature: Any, name: str, path: str, is_tool: bool = False) -> Any:
    """Returns a value of a data set without the nulls that parquet fills in.

    Parquet gives each call the arguments of all calls in the file, and each tool the parameters of all tools. A value
    of the type Json has only its own; but datasets stores a text that is JSON as if it were a value.
    """
    is_tool = is_tool or name in (*TOOL_COLUMNS, *CALL_KEYS)
    if isinstance(feature, Json):
        if name in TEXT_NAMES and isinstance(value, str | int | float):
            warn(
                f"{path}: {name} should be text, but has the type Json of datasets, in which a text that is itself "
                f'JSON comes back as its value, 42 as a number and "yes" without its quotes; {REREAD}'
            )
        return value
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        parts = ((key, _as_written(each, feature[key], key, path, is_tool)) for key, each in value.items())
        return {key: each for key, each in parts if each is not None or not is_tool}
    if isinstance(value, list) and isinstance(feature, List | LargeList):
        return [_as_written(each, feature.feature, name, path, is_tool) for each in value]
    return value


def _read_rows(path: str, split: str) -> Sequence[Row]:
    suffix = Path(path.removesuffix(".gz")).suffix
    if suffix in (*SUFFIXES, PARQUET):
        if Path(path).is_file():
            return _read_parquet(path) if suffix == PARQUET else read_json_rows(Path(path))
    elif not Path(path).exists():
        return _read_hub(path, split)
    raise UserError(
        f"prompts.paths: must name {', '.join((*SUFFIXES, PARQUET))} files or hub data sets, but {path!r} is neither; "
        "correct the path, list the files of a directory, or convert the file"
    )


def _read_parquet(path: str) -> Sequence[Row]:
    set_verbosity(CRITICAL)  # datasets would also log the error that is raised here
    try:
        # Left to itself, datasets takes the size of a file's first group for its batches, though that may be 0.
        rows: Sequence[Row] = Dataset.from_parquet(path, batch_size=1000)
        return rows
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip()
        raise UserError(
            f"{path}: must be a parquet file with rows, but cannot be read ({reason}); create it again"
        ) from error


def _read_hub(name: str, split: str) -> Sequence[Row]:
    """Returns the rows of a split. Those of JSON are read from their files, because datasets changes texts in them."""
    try:
        builder = load_dataset_builder(name)
        if builder.name != "json" or builder.config.field is not None:
            builder.download_and_prepare()
            rows: Sequence[Row] = builder.as_dataset(split)
            return rows
        files, manager = builder.config.data_files, DownloadManager(name)
        wanted = {part.partition("[")[0] for part in split.split("+")} & files.keys()
        parts = {
            part: [
                row
                for path in manager.iter_files(manager.download_and_extract(files[part]))
                for row in read_json_rows(Path(path))
            ]
            for part in wanted
        }
        chosen = ReadInstruction.from_spec(split).to_absolute({part: len(parts[part]) for part in wanted})
        return [row for each in chosen for row in parts[each.splitname][each.from_ : each.to]]
    except UserError:
        raise
    except (*HUB_ERRORS, ValueError, RuntimeError, ImportError, DatasetsError) as error:
        # RuntimeError: a data set that is a script; ImportError: one that needs another package
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise UserError(
            f"prompts.paths: must name files or hub data sets, but {name!r} is not a file, and its split {split!r} "
            f"cannot be loaded from the hub: {error_summary(cause)}; correct prompts.paths and "
            "prompts.split, log in with `hf auth login` if the data set is gated or private, or download it as parquet"
        ) from error
