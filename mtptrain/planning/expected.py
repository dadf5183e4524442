"""Estimates the documents of `prompts.paths` before mtptrain prompts has made them, and before anything long.

The rows of the files that are here are counted; of each file, some rows at equal distances are rendered in the target's
chat template. A text file has at most as many tokens as bytes. Of data sets on the hub nothing is read.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PromptsConfig, PromptSource
from mtptrain.data.chat_template import render_text, require_chat_template, tokenize_rendered
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.row_files import BLANK, SUFFIXES, Row, read_json_rows
from mtptrain.data.rows import RowFormat, parse_row
from mtptrain.data.text_files import find_text_files
from mtptrain.data.traces import documents_of, read_calls
from mtptrain.utils.errors import UserError

MOST_RENDERED = 64
"""Number of rows of a file that are rendered."""
PARQUET = ".parquet"
MOST_BYTES = 2**30
"""Size of a file that is read; a larger one is left to mtptrain prompts."""


class Expected(NamedTuple):
    """What the files of `prompts.paths` make, at most: answers of the target are as long as `responses` allows."""

    documents: int
    """In training, like all but `answers`. Those that long answers are cut into are not known, and not counted."""
    tokens: int
    supervised: int
    longest: int
    mean: int
    """Tokens of a document, averaged over tokens."""
    answers: int
    """Tokens that the target writes."""
    least: int
    """Tokens without these answers."""


class _Size(NamedTuple):
    tokens: int
    supervised: int
    answers: int


def expected_texts(prompts: PromptsConfig) -> Expected:
    """Returns what text files make if every byte, and the beginning of a text, is a token."""
    files, _ = find_text_files(prompts.paths, prompts.pattern, prompts.exclude)
    sizes = [1 + path.stat().st_size for path in files.values()]
    return _joined(prompts, [_Size(each, each, 0) for each in sizes], np.ones(len(sizes)))


def expected_documents(
    prompts: PromptsConfig, max_new_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> Expected | None:
    """Returns what the files make; None if one of the paths is not here.

    Raises UserError if the target has no chat template to render them, or if no row of a file can be rendered.
    """
    paths = [Path(path) for path in prompts.paths]
    if not paths or not all(_is_read(path) for path in paths):
        return None
    if prompts.source.is_chat:
        require_chat_template(tokenizer)
    sizes, weights = list[_Size](), list[float]()
    for path in paths:
        num_rows, chosen = _some_rows(path)
        found, refused = list[_Size](), list[str]()
        for number, row in chosen:
            try:
                found.append(_size(row, prompts, max_new_tokens, tokenizer))
            except (ConversationRefused, TemplateError, KeyError, TypeError) as error:
                refused.append(f"{path}:{number}: {' '.join(str(error).split())}")
        if not found:
            raise UserError(
                f"{path}: every file must hold at least one row that can be used, but none of {len(chosen)} rows can: "
                f"{refused[0] if refused else 'it is empty'}; convert the data, or correct prompts.source, "
                "prompts.schema, prompts.roles or the chat template of target.path"
            )
        sizes += found
        weights += [num_rows / len(chosen)] * len(found)
    return _joined(prompts, sizes, np.array(weights))


def _is_read(path: Path) -> bool:
    is_read = path.name.removesuffix(".gz").endswith((*SUFFIXES, PARQUET))
    return is_read and path.is_file() and path.stat().st_size <= MOST_BYTES


def _some(items: Sequence[Any]) -> Sequence[Any]:
    """Returns `MOST_RENDERED` items at equal distances, or all if there are no more."""
    return [items[i * len(items) // MOST_RENDERED] for i in range(MOST_RENDERED)] if items[MOST_RENDERED:] else items


def _some_rows(path: Path) -> tuple[int, list[tuple[int, Row]]]:
    """Returns the number of rows of a file, and some of them with their numbers, from 1."""
    if path.suffix == PARQUET:
        rows = dataset(path)
        numbers = _some(range(rows.count_rows()))
        return rows.count_rows(), [(i + 1, row) for i, row in zip(numbers, rows.take(numbers).to_pylist(), strict=True)]
    numbered = [(number, row) for number, row in enumerate(read_json_rows(path), 1) if row is not BLANK]
    return len(numbered), list(_some(numbered))


def _size(row: Row, prompts: PromptsConfig, max_new_tokens: int, tokenizer: PreTrainedTokenizerBase) -> _Size:
    if prompts.source is PromptSource.tokens:
        if (calls := read_calls(row)) is not None:
            masks = [mask for _, mask, _ in documents_of(calls)]
            return _Size(sum(map(len, masks)), sum(int(mask.sum()) for mask in masks), 0)
        return _Size(len(row["input_ids"]), sum(map(bool, row["loss_mask"])), 0)
    messages, _ = parse_row(row, RowFormat.of(prompts))
    if prompts.source is PromptSource.conversations:
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        supervised = sum(len(tokenize_rendered(tokenizer, text)) for text in answers)
        return _Size(len(tokenize_rendered(tokenizer, render_text(tokenizer, messages))), supervised, 0)
    asked = [i for i, each in enumerate(messages) if each["role"] == "user"]
    if not asked:
        raise ConversationRefused("no question of a user")
    kept = [{**each, "content": "."} if each["role"] == "assistant" else each for each in messages[: asked[-1] + 1]]
    answers_tokens = len(asked) * max_new_tokens
    prompt = len(tokenize_rendered(tokenizer, render_text(tokenizer, kept, is_prompt=True)))
    return _Size(prompt + answers_tokens, answers_tokens, answers_tokens)


def _joined(prompts: PromptsConfig, sizes: Sequence[_Size], weights: NDArray[np.float64]) -> Expected:
    """Returns what the training split has, for rendered rows of which each stands for so many."""
    tokens, supervised, answers = np.array(sizes, np.float64).T
    lengths, trained = np.minimum(tokens, prompts.max_document_tokens), 1 - prompts.validation_fraction
    total = max(1.0, float(weights @ tokens))
    kept = min(total * trained, prompts.max_train_tokens or math.inf)
    return Expected(
        documents=round(weights @ np.ceil((tokens - answers) / prompts.max_document_tokens) * kept / total),
        tokens=round(kept),
        supervised=round(weights @ supervised * kept / total),
        longest=int(lengths.max()),
        mean=round(weights @ (lengths * tokens) / total),
        answers=round(weights @ answers),
        least=round(weights @ (tokens - answers) * kept / total),
    )
