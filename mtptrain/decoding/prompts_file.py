"""Reads prompts from a user's file of JSON, such as Spec-Bench's questions."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import prompt_text, refuse_dropped_prompts, tokenize_rendered
from mtptrain.data.conversation import ConversationRefused, Message, first_user_turn, text_hash
from mtptrain.data.prompt_files import name_hash
from mtptrain.data.row_files import BLANK, read_json_rows
from mtptrain.data.rows import ANY_SCHEMA, TRAIN_FLAGS, RowFormat, parse_row, pass_over
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import MAX_TEXT_BYTES, refuse_lone_surrogates

KINDS = ("input_ids", "text", "messages", "turns")
"""Columns of which each row has one: the prompt itself."""
ID_COLUMNS = ("id", "question_id")
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(ID_COLUMNS, (str | int, "a string or an integer")),
    "input_ids": (list[int], "a list of integers"),
    "text": (str, "a string"),
    "turns": (Annotated[list[str], Field(min_length=1)], "a list of at least one string"),
}
"""The types of these columns, and what messages call them. Those of messages are known to mtptrain/data/rows.py."""
REFERENCE_COLUMNS = ("reference", "references", "reference_answer")
"""Columns that hold answers to the prompt, which are not read."""


@dataclass(frozen=True)
class Prompts:
    """Prompts and their metadata, by prompt id."""

    input_ids: dict[str, list[int]]
    sources: dict[str, str] = field(default_factory=dict)
    """The file that a prompt comes from, or its group of conversations with the same question. A prompt without an
    entry is its own source."""
    categories: dict[str, str] = field(default_factory=dict)
    turns: dict[str, list[str]] = field(default_factory=dict)
    """All user turns, for conversations whose answers the target generates."""
    questions: dict[str, str] = field(default_factory=dict)
    """Hash of the first user turn, for prompts from a file with turns or messages."""

    @property
    def sha256(self) -> str:
        """Hash of ids, prompts and turns."""
        asked = json.dumps({"prompts": self.input_ids, "turns": self.turns}, sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()


def check_is_file(path: Path) -> None:
    """Raises UserError if `acceptance.prompts_file` is not that of a file."""
    if not path.is_file():
        reason = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"acceptance.prompts_file: must be a jsonl file, but {path} {reason}; correct the path")


def read_prompts_file(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    form: RowFormat = ANY_SCHEMA,
    num_prompts: int | None = None,
) -> Prompts:
    """Returns the prompts of a file of JSON Lines, or of one array: all, or as many as are wanted.

    Each row has `id` (or Spec-Bench's `question_id`) and exactly one of `input_ids`, `text`, `messages` and `turns`.
    With `turns`, the first turn is the prompt. Further columns and keys of messages are read as in training data
    (mtptrain/data/rows.py), as `form` says: honoured, passed over, or refused by name because they change the prompt.
    Columns that say whether a row is to be trained are passed over. A column that is null counts as left out.
    """
    check_is_file(path)
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise UserError(f"{path}: must have at most {MAX_TEXT_BYTES:,} bytes, but has {size:,}; correct the path")
    rows = ((f"{path}:{number}", row) for number, row in enumerate(read_json_rows(path), 1) if row is not BLANK)
    prompts = prompts_of(str(path), rows, tokenizer, vocab_size, form)
    if not prompts.input_ids:
        raise UserError(f"{path}: must hold at least one prompt, but is empty; add lines with `id` and `text`")
    kept = set(sorted(prompts.input_ids, key=name_hash)[:num_prompts])
    named = {each.name: getattr(prompts, each.name) for each in fields(Prompts)}
    return Prompts(**{name: {x: y for x, y in found.items() if x in kept} for name, found in named.items()})


def prompts_of(
    name: str,
    rows: Iterable[tuple[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    form: RowFormat = ANY_SCHEMA,
) -> Prompts:
    """Returns the prompts of rows like those of `read_prompts_file`, each with its name for error messages."""
    prompts, num_twice = Prompts({}), 0
    for where, content in rows:
        row, messages, input_ids = _prompt_of(content, where, tokenizer, form)
        prompt_id = str(next(row[name] for name in ID_COLUMNS if name in row))
        if prompt_id in prompts.input_ids:
            raise UserError(f"{where}: ids must be unique, but {prompt_id!r} occurs twice; rename one")
        outside = [token for token in input_ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(
                f"{where}: tokens must be in the target's vocabulary of {vocab_size}, but one is {outside[0]}; "
                "tokenize the prompts for this target"
            )
        prompts.input_ids[prompt_id] = input_ids
        num_twice += "text" in row and input_ids[:2] == [tokenizer.bos_token_id] * 2
        if "category" in row:
            prompts.categories[prompt_id] = str(row["category"])
        if "turns" in row:
            prompts.turns[prompt_id] = row["turns"]
        if (first := first_user_turn(messages)) is not None:
            prompts.questions[prompt_id] = text_hash(messages[first]["content"])
    if num_twice and os.environ.get("RANK", "0") == "0":
        warn(
            f"{name}: text should not begin with {tokenizer.bos_token}, since the tokenizer puts it before, as servers "
            f"do, but that of {num_twice:,} prompts does; leave it out, or give chats as messages"
        )
    return prompts


def _prompt_of(
    content: Any, where: str, tokenizer: PreTrainedTokenizerBase, form: RowFormat
) -> tuple[dict[str, Any], list[Message], list[int]]:
    """Returns the columns of a row, the messages of a prompt with `messages` or `turns`, and the prompt's tokens."""
    refuse_lone_surrogates(content, where)
    row = {name: value for name, value in content.items() if value is not None} if isinstance(content, dict) else {}
    kinds = [kind for kind in KINDS if kind in row]
    if len(kinds) != 1 or not row.keys() & set(ID_COLUMNS):
        keys = sorted(row) if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"{where}: a row must have `id` and exactly one of `input_ids`, `text`, `messages`, `turns`, but has "
            f"{keys}; correct it"
        )
    for name in row.keys() & TYPES.keys():
        kind, words = TYPES[name]
        try:
            TypeAdapter(kind).validate_python(row[name], strict=True)
        except ValidationError:
            raise UserError(f"{where}: {name} must be {words}, but is {row[name]!r:.40}; correct it") from None
    passed_over = {*kinds, *ID_COLUMNS, "category", *REFERENCE_COLUMNS, *TRAIN_FLAGS, *form.metadata}
    others = {name: value for name, value in row.items() if name not in passed_over}
    try:
        if kinds[0] == "messages":
            messages, _ = parse_row({**others, "messages": row["messages"]}, form)
            return row, messages, _render_whole(tokenizer, messages, where)
        pass_over("column", others)
        if kinds[0] == "turns":
            messages, _ = parse_row({"messages": [{"role": "user", "content": turn} for turn in row["turns"]]})
            return row, messages, _render_whole(tokenizer, messages[:1], where)
    except ConversationRefused as refused:
        raise UserError(f"{where}: must be read as a whole, but cannot be: {refused}; correct it") from refused
    return row, [], row["input_ids"] if kinds[0] == "input_ids" else list(tokenizer(row["text"])["input_ids"])


def _render_whole(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str) -> list[int]:
    """Returns the token ids of a prompt that holds the text of every message, none of which is dropped."""
    if messages[-1]["role"] == "assistant":
        raise ConversationRefused("an answer as its last message, after which no answer is asked for")
    text = prompt_text(tokenizer, messages, where)
    refuse_dropped_prompts(text, messages)
    return tokenize_rendered(tokenizer, text)
