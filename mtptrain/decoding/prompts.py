"""Reads the prompts that acceptance is measured on, from held-out documents or from a file."""

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from mtptrain.config import AcceptanceConfig, PromptsConfig
from mtptrain.data.prompt_files import (
    DOCUMENTS_FILE,
    DocumentEntry,
    Documents,
    Split,
    name_hash,
    refusals_of,
    require_prompts,
)
from mtptrain.data.rows import RowFormat
from mtptrain.decoding.prompts_file import Prompts, read_prompts_file
from mtptrain.decoding.speculate import check_prompts, tokens_to_fit
from mtptrain.heads.base import Head
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError, warn

CHOOSING_FRACTION = 0.25
"""Share of the held-out files or conversations that training uses to choose its best head. Reports use the rest."""
DEFAULT_PROMPTS = 100
"""Number of prompts from held-out documents if no setting names another."""


class HeldOut(StrEnum):
    """The two parts of the held-out data, which share no file, conversation or question."""

    choosing = "choosing"
    reporting = "reporting"


def read_prompts(
    settings: AcceptanceConfig,
    rows: PromptsConfig,
    target: TargetFiles,
    prompts_dir: Path,
    spare_tokens: int = 0,
) -> Prompts:
    """Returns the prompts that the settings select, which fit the target's context with `spare_tokens` left.

    `rows` are the settings of stage 1, whose metadata and roles also hold for the rows of `settings.prompts_file`.
    `prompts_dir` is the output of stage 1.
    """
    context_tokens = target.config.max_position_embeddings
    new_tokens = max(settings.max_new_tokens, settings.num_speculative_tokens)
    if settings.prompts_file is not None:
        form = RowFormat(metadata=rows.metadata, roles=rows.roles)
        prompts = read_prompts_file(
            Path(settings.prompts_file), target.tokenizer, target.config.vocab_size, form, settings.num_prompts
        )
        names = [f"{settings.prompts_file}: id {prompt_id}" for prompt_id in prompts.input_ids]
        check_prompts(list(prompts.input_ids.values()), new_tokens, context_tokens, names, spare_tokens)
        warn_of_trained_questions(prompts.questions, prompts_dir)
        return prompts
    documents = held_out_documents(prompts_dir, HeldOut.reporting)
    lengths = settings.prompt_tokens, new_tokens, context_tokens, spare_tokens
    held_out = held_out_prompts(documents, settings.num_prompts or DEFAULT_PROMPTS, *lengths)
    entries = DocumentEntry.read_all(prompts_dir)
    return Prompts(held_out, sources={prompt_id: entries[int(prompt_id)].group for prompt_id in held_out})


def check_head_context(
    head: Head, prompts: Iterable[Sequence[int]], max_new_tokens: int, num_speculative_tokens: int, setting: str
) -> None:
    """Raises UserError if the longest prompt, its answer and the drafts after it do not fit the head's own context."""
    needed = max(map(len, prompts)) + max_new_tokens + num_speculative_tokens
    if head.context_tokens is not None and needed > head.context_tokens:
        raise UserError(
            f"{setting}: must read the longest prompt with its response and drafts, {needed} tokens, but has a context "
            f"(max_position_embeddings) of {head.context_tokens}; use shorter prompts or answers, draft fewer "
            "tokens, or choose another model"
        )


def check_document_lengths(longest_tokens: int, context_tokens: int | None, whose: str) -> None:
    """Raises UserError if a document is longer than the context of the target, or the head's own."""
    if context_tokens is not None and longest_tokens > context_tokens:
        raise UserError(
            f"prompts.max_document_tokens: documents must have at most {context_tokens} tokens, the "
            f"max_position_embeddings of the {whose}, but the longest has {longest_tokens}; set it to {context_tokens} "
            "or less and run mtptrain prompts and mtptrain hidden-states again"
        )


def warn_of_trained_questions(questions: Mapping[str, str], prompts_dir: Path) -> None:
    """Warn if the first user turn of a prompt is that of a training conversation, even under other system prompts.

    `questions` has the hash of this turn by prompt id. Nothing is compared if stage 1 has not run. Of several ranks,
    only the first one warns.
    """
    if not (prompts_dir / "manifest.json").exists():
        return
    require_prompts(prompts_dir, DOCUMENTS_FILE)
    trained = {entry.group.split(".")[0] for entry in DocumentEntry.read_all(prompts_dir) if entry.split is Split.train}
    known = [prompt_id for prompt_id, question in questions.items() if question in trained]
    if known and os.environ.get("RANK", "0") == "0":
        warn(
            f"acceptance.prompts_file: its first turns should not be among the training prompts of {prompts_dir}, but "
            f"{len(known):,} of {len(questions):,} are (ids {', '.join(known[:5])}{', ...' if len(known) > 5 else ''})"
            "; their acceptance is measured on data that the head was trained on: remove them from the file, or from "
            "prompts.paths and train again"
        )


def held_out_documents(prompts_dir: Path, part: HeldOut) -> Documents:
    """Returns the documents of a part of the held-out data, to cut prompts from.

    For plain texts, these are all windows. For each group of conversations with the same question, this is one document
    that holds the first answer, so that all questions have equal weight and no prompt begins in the middle of a turn.
    """
    documents = Documents.load(require_prompts(prompts_dir, f"{Split.validation}.safetensors"))
    require_prompts(prompts_dir, DOCUMENTS_FILE)
    every_entry = DocumentEntry.read_all(prompts_dir)
    entries = [every_entry[document_id] for document_id in documents.document_ids]
    groups = {entry.group for entry in entries}
    chosen = groups_of(part, groups)
    if not chosen:
        raise UserError(
            f"prompts.validation_fraction: {refusals_of(prompts_dir)}; it must hold out at least 2 files or questions, "
            f"one to choose the best head by and one to report on, but holds out {len(groups)}; raise it and run "
            "mtptrain prompts and mtptrain hidden-states again; or train with train.validation_prompts=0 and run no "
            "mtptrain choose-head"
        )
    indices = [index for index, entry in enumerate(entries) if entry.group in chosen]
    if not documents.loss_mask.all():
        indices = first_answers(documents, entries, indices)
    return Documents.from_list(
        [(int(documents.document_ids[i]), documents.token_ids(i), documents.mask(i)) for i in indices]
    )


def groups_of(part: HeldOut, groups: set[str]) -> set[str]:
    """Returns the groups in a part of the held-out data: files, or sets of conversations with the same question.

    A group's part depends on its name alone, except that with two or more groups no part is left empty.
    """
    in_order = sorted(groups, key=_choosing_hash)
    num_choosing = sum(_choosing_hash(group) < CHOOSING_FRACTION for group in groups)
    num_choosing = min(max(num_choosing, 1), len(groups) - 1)
    return set(in_order[:num_choosing] if part is HeldOut.choosing else in_order[num_choosing:])


def _choosing_hash(group: str) -> float:
    return name_hash(f"choosing {group}")  # must be independent of the hash that selects held-out data


def first_answers(documents: Documents, entries: list[DocumentEntry], indices: list[int]) -> list[int]:
    """Returns those of the indices whose documents' prompts end before a first answer, one for each question.

    Of the conversations with the same question, this takes the one with the fewest tokens before its first answer.
    """
    first: dict[str, int] = {}
    prompt_tokens = {index: int(documents.mask(index).argmax()) for index in indices}
    for index in indices:
        group = entries[index].group
        if entries[index].window == 0 and prompt_tokens[index] <= prompt_tokens[first.setdefault(group, index)]:
            first[group] = index
    if not first:
        raise UserError(
            "prompts.max_document_tokens: the first window of a held-out conversation must hold its first answer, but "
            f"none of the {len({entries[index].name for index in indices})} does; raise it or "
            "prompts.validation_fraction, and run mtptrain prompts and mtptrain hidden-states again"
        )
    return sorted(first.values())


def held_out_prompts(
    documents: Documents,
    num_prompts: int,
    prompt_tokens: int,
    max_new_tokens: int,
    context_tokens: int,
    spare_tokens: int = 0,
) -> dict[str, list[int]]:
    """Returns at most `num_prompts` prompts from held-out documents, by document id, ordered by the hash of the id.

    A conversation is cut before its first answer, and a document without turns after `prompt_tokens` tokens. Documents
    that are too short are skipped, as are those whose prompt, answer and `spare_tokens` would exceed the context.
    """
    prompts: dict[str, list[int]] = {}
    for index in sorted(range(len(documents)), key=lambda index: name_hash(str(documents.document_ids[index]))):
        mask = documents.mask(index)
        end = prompt_tokens if mask.all() else int(mask.argmax())
        if 0 < end <= min(len(mask), context_tokens - spare_tokens - max_new_tokens):
            prompts[str(documents.document_ids[index])] = documents.token_ids(index)[:end].tolist()
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise UserError(
            f"acceptance.prompt_tokens: held-out documents must hold a prompt of {prompt_tokens} tokens (in a "
            f"conversation: all tokens before its first answer) that leaves room for {max_new_tokens} new or "
            f"drafted tokens in a context of {tokens_to_fit(context_tokens, spare_tokens)}, but none of "
            f"{len(documents)} does; lower it, acceptance.max_new_tokens, train.validation_new_tokens or "
            "acceptance.num_speculative_tokens, or raise prompts.validation_fraction"
        )
    return prompts
