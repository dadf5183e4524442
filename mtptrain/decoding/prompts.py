"""Reads the prompts that acceptance is measured on, from held-out documents or from a file."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.config import PipelineConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.data.prompt_files import DOCUMENTS_FILE, DocumentEntry, Documents, Split, name_hash
from mtptrain.data.questions import first_user_turn, text_hash
from mtptrain.decoding.speculate import check_prompts
from mtptrain.heads.base import Head
from mtptrain.run_dir import require
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.files import MAX_TEXT_BYTES, parse_json, refuse_lone_surrogates

CHOOSING_FRACTION = 0.25
"""Share of the held-out files or conversations that training uses to choose its best head. Reports use the rest."""


class HeldOut(StrEnum):
    """Parts of the held-out data. `choosing` and `reporting` share no file, conversation or question."""

    choosing = "choosing"
    reporting = "reporting"
    all = "all"


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


def read_prompts(config: PipelineConfig, target_dir: Path, spare_tokens: int = 0) -> Prompts:
    """Returns the prompts that `config.acceptance` selects, after checking that they fit the target's context.

    Args:
        spare_tokens: number of tokens of the target's context to keep free after prompt and answer.
    """
    settings, target_config = config.acceptance, read_target_config(target_dir)
    context_tokens = target_config.max_position_embeddings - spare_tokens
    if settings.prompts_file is not None:
        prompts = read_prompts_file(Path(settings.prompts_file), load_tokenizer(target_dir), target_config.vocab_size)
        names = [f"{settings.prompts_file}: id {prompt_id}" for prompt_id in prompts.input_ids]
        check_prompts(list(prompts.input_ids.values()), settings.max_new_tokens, context_tokens, names)
        check_num_drafts(prompts.input_ids, settings.num_speculative_tokens, context_tokens)
        warn_of_trained_questions(prompts.questions, config.stage_dir("prompts"))
        return prompts
    prompts_dir = config.stage_dir("prompts")
    documents = held_out_documents(prompts_dir, HeldOut.reporting)
    found = held_out_prompts(
        documents, settings.num_prompts, settings.prompt_tokens, settings.max_new_tokens, context_tokens
    )
    check_num_drafts(found, settings.num_speculative_tokens, context_tokens)
    entries = DocumentEntry.read_all(prompts_dir)
    return Prompts(found, sources={prompt_id: entries[int(prompt_id)].group for prompt_id in found})


def check_num_drafts(prompts: Mapping[str, Sequence[int]], num_speculative_tokens: int, context_tokens: int) -> None:
    """Raises ValueError if the drafts after the longest prompt do not fit the target's context."""
    longest = max(map(len, prompts.values()))
    if longest + num_speculative_tokens > context_tokens:
        raise ValueError(
            f"acceptance.num_speculative_tokens: must be at most {context_tokens - longest}, so that the drafts after "
            f"the longest prompt of {longest} tokens fit a context of {context_tokens} tokens, but is "
            f"{num_speculative_tokens}; lower it, or use shorter prompts"
        )


def check_head_context(
    head: Head, prompts: Iterable[Sequence[int]], max_new_tokens: int, num_speculative_tokens: int, setting: str
) -> None:
    """Check that the longest prompt, its answer and the drafts after it fit the head's own context, if it has one.

    Args:
        head: the head that drafts.
        prompts: token ids of the prompts.
        max_new_tokens: largest number of tokens of an answer.
        num_speculative_tokens: K.
        setting: name of the setting that chose the head, for the error message.

    Raises:
        ValueError: the longest prompt does not fit with its answer and drafts.
    """
    needed = max(map(len, prompts)) + max_new_tokens + num_speculative_tokens
    if head.context_tokens is not None and needed > head.context_tokens:
        raise ValueError(
            f"{setting}: must read the longest prompt with its response and drafts, {needed} tokens, but has a context "
            f"(max_position_embeddings) of {head.context_tokens}; leave out long prompts, lower "
            "acceptance.num_speculative_tokens, or choose another model"
        )


def check_document_lengths(longest_tokens: int, head: Head) -> None:
    """Raises ValueError if a document is longer than the head's own context."""
    if head.context_tokens is not None and longest_tokens > head.context_tokens:
        raise ValueError(
            f"prompts.max_document_tokens: documents must have at most {head.context_tokens} tokens, the "
            f"max_position_embeddings of the draft model, but the longest has {longest_tokens}; set it to "
            f"{head.context_tokens} or less and run data_prep.prompts and data_prep.hidden_states again"
        )


def warn_of_trained_questions(questions: Mapping[str, str], prompts_dir: Path) -> None:
    """Warn if the first user turn of a prompt is that of a training conversation, even under other system prompts.

    Args:
        questions: hash of the first user turn by prompt id.
        prompts_dir: output of stage 1; nothing is compared if it does not exist.
    """
    if not (prompts_dir / DOCUMENTS_FILE).exists():
        return
    trained = {entry.group.split(".")[0] for entry in DocumentEntry.read_all(prompts_dir) if entry.split is Split.train}
    known = [prompt_id for prompt_id, question in questions.items() if question in trained]
    if known:
        warnings.warn(
            f"acceptance.prompts_file: its first turns should not be among the training prompts of {prompts_dir}, but "
            f"{len(known):,} of {len(questions):,} are (ids {', '.join(known[:5])}{', ...' if len(known) > 5 else ''})"
            "; their acceptance is measured on data that the head was trained on: remove them from the file, or from "
            "prompts.paths and train again",
            stacklevel=2,
        )


def held_out_documents(prompts_dir: Path, part: HeldOut = HeldOut.all) -> Documents:
    """Returns the documents of a part of the held-out data, to cut prompts from.

    For plain texts, these are all windows. For each group of conversations with the same question, this is one document
    that holds the first answer, so that all questions have equal weight and no prompt begins in the middle of a turn.

    Raises:
        FileNotFoundError: stage 1 has not run.
        ValueError: `part` would be empty, or no conversation has its first answer in its first window.
    """
    documents = Documents.load(require(prompts_dir / f"{Split.validation}.safetensors", "data_prep.prompts"))
    every_entry = DocumentEntry.read_all(prompts_dir)
    ids = documents.document_ids
    if unknown := [int(document_id) for document_id in ids if not 0 <= document_id < len(every_entry)]:
        raise ValueError(
            f"{prompts_dir / f'{Split.validation}.safetensors'}: document_ids must be those of the {len(every_entry)} "
            f"lines of {DOCUMENTS_FILE}, but one is {unknown[0]}; run data_prep.prompts again"
        )
    entries = [every_entry[document_id] for document_id in ids]
    wanted = groups_of(part, {entry.group for entry in entries})
    indices = [index for index, entry in enumerate(entries) if entry.group in wanted]
    if not documents.loss_mask.all():
        indices = first_answers(documents, entries, indices)
    return Documents.from_list(
        [(int(documents.document_ids[i]), documents.tokens(i), documents.mask(i)) for i in indices]
    )


def groups_of(part: HeldOut, groups: set[str]) -> set[str]:
    """Returns the groups in a part of the held-out data: files, or sets of conversations with the same question.

    A group's part depends on its name alone, except that with two or more groups no part is left empty.

    Raises:
        ValueError: the part would be empty.
    """
    if part is HeldOut.all:
        return groups
    in_order = sorted(groups, key=_choosing_hash)
    num_choosing = sum(_choosing_hash(group) < CHOOSING_FRACTION for group in groups)
    num_choosing = min(max(num_choosing, 1), len(groups) - 1)
    wanted = set(in_order[:num_choosing] if part is HeldOut.choosing else in_order[num_choosing:])
    if not wanted:
        raise ValueError(
            "prompts.validation_fraction: must hold out at least 2 files or questions, one to choose the best head by "
            f"and one to report on, but holds out {len(groups)}; raise it and run data_prep.prompts and "
            "data_prep.hidden_states again; or train with train.validation_prompts=0 and run no eval.choose_head"
        )
    return wanted


def _choosing_hash(group: str) -> float:
    return name_hash(f"choosing {group}")  # must be independent of the hash that selects held-out data


def first_answers(documents: Documents, entries: list[DocumentEntry], indices: list[int]) -> list[int]:
    """Returns the indices of the documents whose prompts end before a first answer, one for each question.

    Of the conversations with the same question, this takes the one with the fewest tokens before its first answer.

    Args:
        indices: indices of the documents to choose from.

    Raises:
        ValueError: no conversation has its first answer in its first window.
    """
    first: dict[str, int] = {}
    prompt_tokens = {index: int(documents.mask(index).argmax()) for index in indices}
    for index in indices:
        group = entries[index].group
        if entries[index].window == 0 and prompt_tokens[index] <= prompt_tokens[first.setdefault(group, index)]:
            first[group] = index
    if not first:
        raise ValueError(
            "prompts.max_document_tokens: the first window of a held-out conversation must hold its first answer, but "
            f"none of the {len({entries[index].name for index in indices})} does; raise it or "
            "prompts.validation_fraction, and run data_prep.prompts and data_prep.hidden_states again"
        )
    return sorted(first.values())


def held_out_prompts(
    documents: Documents, num_prompts: int, prompt_tokens: int, max_new_tokens: int, context_tokens: int
) -> dict[str, list[int]]:
    """Returns at most `num_prompts` prompts from held-out documents, by document id, ordered by the hash of the id.

    A conversation is cut before its first answer, and a document without turns after `prompt_tokens` tokens. Documents
    that are too short are skipped, as are those whose prompt and answer would exceed the context.

    Raises:
        ValueError: no document yields a prompt.
    """
    prompts: dict[str, list[int]] = {}
    for index in sorted(range(len(documents)), key=lambda index: name_hash(str(documents.document_ids[index]))):
        mask = documents.mask(index)
        end = prompt_tokens if mask.all() else int(mask.argmax())
        if 0 < end <= min(len(mask), context_tokens - max_new_tokens):
            prompts[str(documents.document_ids[index])] = documents.tokens(index)[:end].tolist()
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise ValueError(
            f"acceptance.prompt_tokens: held-out documents must hold a prompt of {prompt_tokens} tokens (in a "
            f"conversation: all tokens before its first answer) that leaves room for {max_new_tokens} new tokens in a "
            f"context of {context_tokens}, but none of {len(documents)} does; lower it, acceptance.max_new_tokens or "
            "train.validation_new_tokens, or raise prompts.validation_fraction"
        )
    return prompts


def read_prompts_file(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Prompts:
    """Returns the prompts of a jsonl file.

    Each line has `id` (or Spec-Bench's `question_id`) and exactly one of `input_ids`, `text`, `messages` and `turns`.
    With `turns`, the first turn is the prompt.

    Raises:
        FileNotFoundError: the path is not that of a file.
        ValueError: the file is too large, a line does not have this form, an id occurs twice, a token is not in the
            vocabulary, or there is no prompt.
    """
    if not path.is_file():
        reason = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"acceptance.prompts_file: must be a jsonl file, but {path} {reason}; correct the path")
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: must have at most {MAX_TEXT_BYTES:,} bytes, but has {size:,}; correct the path")
    prompts = Prompts({})
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        row, input_ids = _prompt_of(line, f"{path}:{number}", tokenizer)
        prompt_id = str(row["id"] if "id" in row else row["question_id"])
        if prompt_id in prompts.input_ids:
            raise ValueError(f"{path}:{number}: ids must be unique, but {prompt_id!r} occurs twice; rename one")
        outside = [token for token in input_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{path}:{number}: tokens must be in the target's vocabulary of {vocab_size}, but one is {outside[0]}; "
                "tokenize the prompts for this target"
            )
        prompts.input_ids[prompt_id] = input_ids
        if "category" in row:
            prompts.categories[prompt_id] = str(row["category"])
        if "turns" in row:
            prompts.turns[prompt_id] = row["turns"]
        if (question := _first_turn(row)) is not None:
            prompts.questions[prompt_id] = text_hash(question)
    if not prompts.input_ids:
        raise ValueError(f"{path}: must hold at least one prompt, but is empty; add lines with `id` and `text`")
    return prompts


def _first_turn(row: Mapping[str, Any]) -> str | None:
    """Returns the first user turn of a row with `turns` or `messages`; None if there is no such turn."""
    if "turns" in row:
        return str(row["turns"][0])
    messages = row.get("messages", [])
    index = first_user_turn([{"role": str(message.get("role"))} for message in messages])
    return None if index is None else str(messages[index].get("content"))


def _prompt_of(line: bytes, where: str, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], list[int]]:
    row = parse_json(line, where)
    refuse_lone_surrogates(row, where)
    kinds = [kind for kind in ("input_ids", "text", "messages", "turns") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1 or not {"id", "question_id"} & row.keys():
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where}: a line must have `id` and exactly one of `input_ids`, `text`, `messages`, `turns`, but has "
            f"{keys}; correct it"
        )
    if kinds[0] == "input_ids":
        if not isinstance(row["input_ids"], list) or not all(type(token) is int for token in row["input_ids"]):
            raise ValueError(
                f"{where}: input_ids must be a list of integers, but is {str(row['input_ids'])[:40]}; correct it"
            )
        return row, row["input_ids"]
    if kinds[0] == "text":
        if not isinstance(row["text"], str):
            raise ValueError(f"{where}: text must be a string, but is {str(row['text'])[:40]}; correct it")
        return row, list(tokenizer(row["text"])["input_ids"])
    if kinds[0] == "turns":
        if (
            not isinstance(row["turns"], list)
            or not row["turns"]
            or not all(isinstance(turn, str) for turn in row["turns"])
        ):
            raise ValueError(
                f"{where}: turns must be a list of at least one string, but is {str(row['turns'])[:40]}; correct it"
            )
        return row, render_prompt(tokenizer, [{"role": "user", "content": row["turns"][0]}], where)
    if not isinstance(row["messages"], list) or not all(
        isinstance(message, dict) for message in row["messages"] or [0]
    ):
        raise ValueError(
            f"{where}: messages must be a list of at least one message, but is {str(row['messages'])[:40]}; correct it"
        )
    return row, render_prompt(tokenizer, row["messages"], where)
