"""Reads the prompt source `tokens`: rows that somebody else has tokenized, with `input_ids` and `loss_mask`."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.rows import Row, kind, refuse_unread_columns, text_of

from .assistant_masks import Encoding
from .row_files import UsableRows

COLUMNS = ("input_ids", "loss_mask", "attention_mask")


@dataclass
class TokenSource(UsableRows):
    """Usable rows of tokens, each with the loss mask that says what is supervised, and why other rows were refused."""

    metadata: Collection[str] = ()

    def __post_init__(self) -> None:
        self.clusters = self.groups

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        return [[read_tokens(self.row(index), self.metadata)] for index in indices]


def read_token_rows(paths: Sequence[str], metadata: Collection[str], split: str) -> TokenSource:
    """Reads all files and data sets, and finds the usable rows.

    A row's group is the hash of its tokens before the first supervised one, or of all if that comes first, so answers
    to one prompt stay together.

    Args:
        paths: see `UsableRows.add_all`, which also lists the errors.
        metadata: names of further columns that only describe a row.
        split: split of hub data sets.
    """

    def identify(row: Row) -> tuple[str, str]:
        encoding = read_tokens(row, metadata)
        ids = encoding.input_ids
        asked = ids[: encoding.loss_mask.argmax()]
        name = row.get("id")
        return _hash(ids) if name in (None, "") else text_of("id", str(name)), _hash(asked if len(asked) else ids)

    rows = TokenSource(metadata=metadata)
    rows.add_all(paths, split, identify)
    return rows


def read_tokens(row: Row, metadata: Collection[str] = ()) -> Encoding:
    """Returns the token ids and the loss mask of a row.

    Raises:
        ConversationRefused: the row lacks one of them, their lengths differ, a value is out of range, no token is
            supervised, or a further column is not read.
    """
    if not isinstance(row, Mapping):
        raise ConversationRefused(f"a row must be an object, but is {kind(row)}")
    columns = {name: value for name, value in row.items() if name not in metadata and value is not None}
    ids = _numbers("input_ids", columns, 2**31 - 1)
    mask = _numbers("loss_mask", columns, 1)
    seen = _numbers("attention_mask", columns, 1) if "attention_mask" in columns else np.ones_like(ids)
    if not len(ids) == len(mask) == len(seen):
        raise ConversationRefused("input_ids and masks of different lengths")
    if not seen.all():
        raise ConversationRefused("an attention_mask with zeros, which is not read: leave out the padding")
    if not mask.any():
        raise ConversationRefused("a loss_mask that selects no token")
    refuse_unread_columns({name: value for name, value in columns.items() if name not in COLUMNS}, metadata)
    return Encoding(ids.astype(np.int32), mask.astype(np.uint8))


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
