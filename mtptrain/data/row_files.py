"""Reads the rows of files of JSON, whatever their names say: JSON Lines or one array, gzipped or not."""

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json

Row = Mapping[str, Any]

BLANK: Row = {}
"""Stands for an empty line, so that the index of a row is that of its line."""
SUFFIXES = (".jsonl", ".json")
"""Ends of the names of these files, to which `.gz` may be added."""
REWRITE = "a file must hold one row in each line, or one array of rows; `jq -c . FILE` writes one value in each line"


def read_json_rows(path: Path) -> list[Row]:
    """Returns the rows of a file that holds one row in each line, one array of rows, or one row over several lines."""
    try:
        with _opened(path) as file:
            is_of_lines = _is_of_lines(file)
            file.seek(0)
            if is_of_lines:
                return [
                    parse_json(line, f"{path}:{number}", "correct or remove it") if line.strip() else BLANK
                    for number, line in enumerate(file, start=1)
                ]
            content = parse_json(file.read(), str(path), REWRITE)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: must be a whole gzip file, as its first bytes say, but is not ({error}); create it again"
        ) from error
    return content if isinstance(content, list) else [content]


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if is_gzipped else path.open("rb")


def _is_of_lines(file: BinaryIO) -> bool:
    """Returns whether the first line that is not empty is a whole value, other than an array that is the whole file."""
    lines = (line for line in file if line.strip())
    try:
        value = json.loads(next(lines, b"{}"))
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, list) or next(lines, None) is not None
