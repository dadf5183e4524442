"""Reads rows from jsonl, json and parquet files and from data sets on the hub, and finds those that can be used."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from datasets.utils.logging import CRITICAL, set_verbosity

from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.rows import Row, kind
from mtptrain.data.tool_calls import without_filled_nulls
from mtptrain.target.hub import HUB_ERRORS
from mtptrain.utils.errors import UserError, reason_of
from mtptrain.utils.files import parse_json

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
CORRECT = "correct or remove it"
REASONS_SHOWN = 3


class SourceMissing(UserError):
    """A path of `prompts.paths` is neither a file nor a data set that can be loaded."""


@dataclass(frozen=True)
class Rows:
    """The rows of one file or hub data set, with their line or row numbers."""

    path: str
    rows: Sequence[Row]
    numbers: Sequence[int]
    """Line number in a jsonl file, otherwise row number, from 1."""

    def location(self, index: int) -> str:
        return f"{self.path}:{self.numbers[index]}"

    def row(self, index: int) -> Row:
        """Returns a row, without the nulls that parquet fills into tools and calls."""
        return self._as_written(self.rows[index])

    def _as_written(self, row: Row) -> Row:
        return without_filled_nulls(row) if isinstance(self.rows, Dataset) else row

    def read(self) -> Iterator[tuple[int, Row]]:
        """Yields every row with its index, as `row` returns it.

        Raises:
            UserError: a row cannot be decoded, for example because a text in a parquet file is not UTF-8.
        """
        try:
            for index, row in enumerate(self.rows):
                yield index, self._as_written(row)
        except ValueError as error:
            raise UserError(
                f"{self.path}: every row must be readable, but one is not ({error}); create the file again"
            ) from error


@dataclass
class UsableRows:
    """Usable rows, and why the others were refused."""

    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    """Group of each usable row. Rows with the same question share a group, which stays in one split."""
    origins: list[tuple[Rows, int]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why a row cannot be used, by its location."""

    def row(self, index: int) -> Row:
        """Reads a usable row again, because rows are not kept.

        Parquet files and hub data sets are memory-mapped. The rows of jsonl and json files are in memory.
        """
        rows, row = self.origins[index]
        return rows.row(row)

    def location(self, index: int) -> str:
        rows, row = self.origins[index]
        return rows.location(row)

    def add_all(self, paths: Sequence[str], split: str, identify: Callable[[Row], tuple[str, str]]) -> None:
        """Reads all files and data sets, and adds their rows.

        Args:
            paths: jsonl, json (one array) or parquet files, and names of data sets on the hub.
            split: split of hub data sets.
            identify: returns the name and the group of a row, or raises ConversationRefused.

        Raises:
            UserError: a path is neither a file nor a hub data set, or a path is given twice or is a directory, a file
                cannot be read or has another suffix than `FILE_SUFFIXES`, or has no usable row.
        """
        refuse_duplicate_paths(paths)
        for rows in [_read_rows(path, split) for path in paths]:
            refused: dict[str, str] = {}
            for index, row in rows.read():
                try:
                    name, group = identify(row)
                except ConversationRefused as refusal:
                    refused[rows.location(index)] = str(refusal)
                    continue
                self.names.append(name)
                self.groups.append(group)
                self.origins.append((rows, index))
            if len(refused) == len(rows.rows):
                raise _all_refused(rows.path, refused)
            self.refused.update(refused)


def _all_refused(path: str, refused: Mapping[str, str]) -> UserError:
    """Returns the error for a file without a usable row, with the most frequent reasons for refusing rows."""
    reasons = Counter(refused.values()).most_common(REASONS_SHOWN)
    counted = ", ".join(f"{count:,} refused ({reason})" for reason, count in reasons)
    found = f"none: {counted}; the first row is {next(iter(refused))}" if refused else "no row at all"
    return UserError(
        f"prompts.paths: every file must hold at least one usable row, but {path} holds {found}; convert the data, or "
        "correct prompts.source, prompts.paths, prompts.schema or prompts.roles"
    )


def refuse_duplicate_paths(paths: Sequence[str]) -> None:
    duplicates = [path for path, count in Counter(paths).items() if count > 1]
    if duplicates:
        raise UserError(
            f"prompts.paths: must name each path once, but names {', '.join(duplicates)} more than once; "
            "remove the duplicates"
        )


def _read_rows(path: str, split: str) -> Rows:
    suffix = Path(path).suffix
    if Path(path).is_dir():
        raise UserError(f"prompts.paths: must name files or hub data sets, but {path!r} is a directory; list its files")
    if Path(path).is_file() and suffix not in FILE_SUFFIXES:
        raise UserError(
            f"prompts.paths: files must end in {', '.join(FILE_SUFFIXES)}, but {path!r} does not; convert the file"
        )
    if Path(path).is_file():
        return {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[suffix](path)
    if suffix in FILE_SUFFIXES or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
        raise SourceMissing(
            f"prompts.paths: must name files or hub data sets, but {path!r} does not exist; correct the path"
        )
    return _read_hub(path, split)


def _read_jsonl(path: str) -> Rows:
    rows: dict[int, Row] = {}
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows[number] = parse_json(line, f"{path}:{number}", CORRECT)
    return Rows(path, list(rows.values()), list(rows))


def _read_json(path: str) -> Rows:
    content = parse_json(Path(path).read_bytes(), path, CORRECT)
    if not isinstance(content, list):
        raise UserError(f"{path}: must hold one array of rows, but holds {kind(content)}; convert it to jsonl")
    return Rows(path, content, range(1, len(content) + 1))


def _read_parquet(path: str) -> Rows:
    set_verbosity(CRITICAL)  # datasets would also log the error that is raised here
    try:
        rows = Dataset.from_parquet(path)
    except (ValueError, OSError, DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip()
        raise UserError(
            f"{path}: must be a parquet file with rows, but cannot be read ({reason}); create it again"
        ) from error
    return Rows(path, rows, range(1, len(rows) + 1))


def _read_hub(name: str, split: str) -> Rows:
    try:
        rows = load_dataset(name, split=split)
    except (*HUB_ERRORS, ValueError, RuntimeError, DatasetsError) as error:  # RuntimeError: a data set that is a script
        raise SourceMissing(
            f"prompts.paths: must name files or hub data sets, but {name!r} is not a file, and its split {split!r} "
            f"cannot be loaded from the hub: {reason_of(error)}; correct prompts.paths and prompts.split, log in with "
            "`hf auth login` if the data set is gated or private, or download it as parquet"
        ) from error
    return Rows(name, rows, range(1, len(rows) + 1))
