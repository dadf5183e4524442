"""Tests which prompts acceptance is measured on."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtptrain.config import AcceptanceConfig, PipelineConfig, PromptsConfig
from mtptrain.data.conversation import question_group
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split
from mtptrain.decoding.prompts import (
    HeldOut,
    held_out_documents,
    held_out_prompts,
    read_prompts,
    warn_of_trained_questions,
)
from mtptrain.decoding.prompts_file import Prompts, read_prompts_file
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import DEMO_DIR, load_tokenizer
from mtptrain.utils.errors import UserError
from tests.conftest import make_tokenizer
from tests.sealed import seal_prompts

SIZES = {"num_prompts": 10, "prompt_tokens": 64, "max_new_tokens": 32, "context_tokens": 128}


def write_held_out(directory: Path, *documents: tuple[str, int, int, list[int]]) -> Path:
    """Writes a held-out split from (name, window, turn, loss mask)."""
    directory.mkdir(exist_ok=True)
    entries, split = [], []
    for i, (name, window, turn, mask) in enumerate(documents):
        entries.append(DocumentEntry(i, name, Split.validation, len(mask), window, turn, name))
        split.append((i, np.arange(len(mask)) + 100 * i, mask))
    DocumentEntry.write_all(directory, entries)
    Documents.from_list(split).save(directory / "validation.safetensors")
    seal_prompts(directory)
    return directory


CHOOSING = ("choosing", 0, 0, [0] * 9 + [1])
"""A document by which the best head is chosen, beside others whose names are in the part that is reported."""
LATE = ("long question", 1, 0, [0] * 5 + [1] * 20)
"""A conversation without an answer in its first window."""


def test_a_conversation_gives_the_prompt_of_its_first_answer_and_every_window_of_a_text_may_give_one(
    tmp_path: Path,
) -> None:
    turns = ((0, [0] * 40 + [1] * 10), (4, [0] * 25 + [1] * 10), (2, [0] * 10 + [1] * 10))
    rewritten = [("rewritten", 0, turn, mask) for turn, mask in turns]
    others = ("one", 0, 0, [0] * 12 + [1] * 18), ("too long", 0, 0, [0] * 290 + [1] * 10), LATE, CHOOSING
    prompts_dir = write_held_out(tmp_path / "chats", *rewritten, *others)
    prompts = held_out_prompts(held_out_documents(prompts_dir, HeldOut.reporting), **SIZES)
    assert {name: (prompt[0], len(prompt)) for name, prompt in prompts.items()} == {"2": (200, 10), "3": (300, 12)}
    text = write_held_out(tmp_path / "text", *(("a", i, 0, [1] * length) for i, length in enumerate((100, 50, 100))))
    prompts = held_out_prompts(held_out_documents(text, HeldOut.reporting), **SIZES)  # the second is too short
    assert {name: (prompt[0], len(prompt)) for name, prompt in prompts.items()} == {"0": (0, 64), "2": (200, 64)}


def test_the_best_head_is_not_chosen_on_the_files_that_are_reported(tmp_path: Path) -> None:
    names = [f"file {index // 3}" for index in range(300)]  # each file has three windows
    prompts_dir = write_held_out(tmp_path, *((name, index % 3, 0, [1] * 10) for index, name in enumerate(names)))
    parts = {part: {names[i] for i in held_out_documents(prompts_dir, part).document_ids} for part in HeldOut}
    assert parts[HeldOut.choosing] | parts[HeldOut.reporting] == set(names)
    assert not parts[HeldOut.choosing] & parts[HeldOut.reporting]
    assert 15 < len(parts[HeldOut.choosing]) < 35  # about a quarter of 100 files
    documents = held_out_documents(prompts_dir, HeldOut.reporting)
    assert len(documents) == 3 * len(parts[HeldOut.reporting]), "all windows of a file must be in the same part"
    fewer = write_held_out(tmp_path / "fewer", *((name, 0, 0, [1] * 10) for name in names[::6]))
    kept = {names[6 * i] for i in held_out_documents(fewer, HeldOut.choosing).document_ids}
    assert kept == parts[HeldOut.choosing] & set(names[::6]), "the part of a file must not depend on other files"


def test_a_question_is_asked_once_and_in_one_half(tmp_path: Path) -> None:
    """Copies of a question must not count twice, nor be used both to choose the best head and in the report."""
    names = [f"question {i % 40}" for i in range(400)]
    write_held_out(tmp_path, *((name, 0, 0, [0] * 10 + [1] * 10) for name in names))
    found = [i for part in HeldOut for i in held_out_documents(tmp_path, part).document_ids]
    assert sorted(names[i] for i in found) == sorted(set(names))


def test_held_out_documents_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    two = write_held_out(tmp_path / "two", ("a", 0, 0, [1] * 10), ("b", 0, 0, [1] * 10))
    assert [len(held_out_documents(two, part)) for part in (HeldOut.choosing, HeldOut.reporting)] == [1, 1]
    one = write_held_out(tmp_path / "one", ("a", 0, 0, [1] * 10))
    refused = {"counts": {"items": 9}, "refused": [{"reason": "no answer", "count": 8, "first": ["a:1"]}]}
    (one / "report.json").write_text(json.dumps(refused))
    message = r"prompts\.validation_fraction: 8 of 9 .*: 8 \(no answer\), the first is a:1; it .* holds out 1;"
    with pytest.raises(UserError, match=message):
        held_out_documents(one, HeldOut.choosing)
    late = write_held_out(tmp_path / "late", LATE, ("another", 2, 0, [0, 1]), CHOOSING)
    message = r"prompts\.max_document_tokens: the first window of .* must hold its first answer, but none of the 2 does"
    with pytest.raises(UserError, match=message + "; raise it"):
        held_out_documents(late, HeldOut.reporting)


def read_rows(directory: Path, *rows: dict[str, Any]) -> Prompts:
    path, array = directory / "prompts.jsonl", directory / "array.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    array.write_text(json.dumps(rows, indent=1))
    prompts = read_prompts_file(path, make_tokenizer(), 260)
    assert read_prompts_file(array, make_tokenizer(), 260) == prompts
    few = read_prompts_file(path, make_tokenizer(), 260, num_prompts=2)
    assert len(few.input_ids) == 2 and few.input_ids.items() <= prompts.input_ids.items()
    assert few.turns.keys() | few.questions.keys() | few.categories.keys() <= few.input_ids.keys()
    return prompts


BRIEF: dict[str, object] = {"role": "system", "content": "Be brief."}


def asked(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def test_a_prompts_file_takes_token_ids_text_and_messages(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "input_ids": [1, 2, 3]},
        {"id": 7, "text": "def f"},
        {"id": "c", "messages": asked("hi")},
        {"question_id": 81, "category": "writing", "turns": ["hello", "shorter"]},
        {"id": None, "question_id": 82, "category": None, "text": "def f", "messages": None},
        {"id": "flags", "text": "hi", "weight": 0, "train": False},  # say that a row is not to be trained
        {"id": "column", "messages": asked("hi"), "system": "Be brief.", "reference": ["yes"], "source": "x"},
        {"id": "message", "messages": [BRIEF, *asked("hi")]},
    ]
    read, tokenizer = read_rows(tmp_path, *rows), make_tokenizer()
    prompts = read.input_ids
    assert list(prompts) == ["a", "7", "c", "81", "82", "flags", "column", "message"]
    assert prompts["a"] == [1, 2, 3]
    assert tokenizer.decode(prompts["7"]) == "def f"
    assert tokenizer.decode(prompts["c"]) == "<user>hi<|end|><assistant>"
    assert tokenizer.decode(prompts["81"]) == "<user>hello<|end|><assistant>"
    assert read.categories == {"81": "writing"} and read.turns == {"81": ["hello", "shorter"]}
    assert prompts["column"] == prompts["message"] and "Be brief." in tokenizer.decode(prompts["column"])


def test_a_text_that_begins_with_bos_gets_it_twice_as_on_a_server_and_is_counted(tmp_path: Path) -> None:
    (path := tmp_path / "prompts.jsonl").write_text('{"id": 1, "text": "<|endoftext|>a"}\n{"id": 2, "text": "a"}\n')
    with pytest.warns(
        UserWarning, match=r"not begin with <\|endoftext\|>, .* but that of 1 prompts does; leave it out"
    ):
        assert list(read_prompts_file(path, load_tokenizer(DEMO_DIR), 4096).input_ids.values()) == [[0, 0, 65], [0, 65]]


def test_prompts_of_a_file_that_were_trained_on_are_counted_in_a_warning(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmark prompts may be in the training data."""
    questions = read_rows(
        tmp_path,
        {"id": "turns", "turns": ["Trained  ON?", "more"]},
        {"id": "messages", "messages": [BRIEF, *asked("trained on?")]},
        {"id": "held out", "turns": ["held out?"]},
        {"id": "text", "text": "trained on?"},
    ).questions
    warn_of_trained_questions(questions, tmp_path)  # must not warn, because stage 1 has not run
    entries = [
        DocumentEntry(i, f"chat{i}", split, 9, 0, 0, question_group([BRIEF, *asked(text)]))
        for i, (split, text) in enumerate([(Split.train, "trained on?"), (Split.validation, "held out?")])
    ]
    DocumentEntry.write_all(tmp_path, entries)
    seal_prompts(tmp_path)
    with monkeypatch.context() as second_rank:
        second_rank.setenv("RANK", "1")
        warn_of_trained_questions(questions, tmp_path)
    assert not user_warnings
    counted = r"2 of 3 are \(ids turns, messages\); their accept"
    with pytest.warns(UserWarning, match=rf"first turns should not be .*, but {counted}"):
        warn_of_trained_questions(questions, tmp_path)


BAD_FILES = [
    ("", r"must hold at least one prompt, but is empty; add lines with `id` and `text`"),
    ('{"id": 1, "text": "a"}\n{oops', r":2: must be JSON, but is not \("),
    ('{"id": 1}', r":1: .* must have `id` and exactly one of `input_ids`, `text`, `messages`, .* but has \['id'\]"),
    ('{"id": 1, "turns": []}', r":1: turns must be a list of at least one string, but is \[\]; correct it"),
    ('{"id": [1], "text": "a"}', r":1: id must be a string or an integer, but is \[1\]; correct it"),
    ('{"id": 1, "input_ids": "abc"}', r":1: input_ids must be a list of integers, but is 'abc'"),
    ('{"id": 1, "input_ids": [1, 999]}', r":1: tokens must be in the target's vocabulary of 260, but one is 999"),
    ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', r":2: ids must be unique, but '1' occurs twice"),
    ('{"id": 1, "turns": ["\\ud83d"]}', r":1: texts must be valid Unicode, .*\\ud83d.*; correct"),
    ('{"id": 1, "text": "hi", "image": "a.png"}', "read as a whole, but cannot be: column image, which may "),
    ('{"id": 1, "turns": ["hi"], "system": "x"}', "cannot be: column system, which may"),
]


def test_a_bad_prompts_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, message in BAD_FILES:
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=f"^{path}.*{message}"):
            read_prompts_file(path, make_tokenizer(), 260)
    with pytest.raises(UserError, match=r"^acceptance\.prompts_file: must be a jsonl file, but / is not a file; cor"):
        read_prompts_file(Path("/"), make_tokenizer(), 260)


def test_columns_keys_and_roles_that_the_settings_name_are_read_as_in_training_data(
    config_for: Callable[..., PipelineConfig], tmp_path: Path, tiny_target: Path
) -> None:
    path = tmp_path / "asked.jsonl"
    client = {"role": "client", "content": "hi", "name": "ann"}
    rows = [{"messages": [client]}, {"turns": ["hi"]}, {"text": "<user>hi<|end|><assistant>"}]
    path.write_text("\n".join(json.dumps({"id": number, "mask": "x", **row}) for number, row in enumerate(rows)))
    named = ("prompts.metadata=[mask,name]", "+prompts.roles.client=user", "prompts.schema=sharegpt")
    config = config_for(f"acceptance.prompts_file={path}", "acceptance.max_new_tokens=8", *named)
    target = TargetFiles(tiny_target)
    read = read_prompts(config.acceptance, config.prompts, target, tmp_path).input_ids
    assert read["0"] == read["1"] == read["2"]
    config.prompts.metadata.remove("mask")
    message = r":1: must be .*column mask, .*\(add mask to prompts\.metadata to pass it over\)"
    with pytest.raises(UserError, match=message):
        read_prompts(config.acceptance, config.prompts, target, tmp_path)


def test_prompts_that_leave_no_tokens_to_spare_are_refused_with_the_targets_own_context(
    tmp_path: Path, tiny_target: Path
) -> None:
    """The tiny target's context has 512 tokens, of which a caller keeps 10 free."""
    write_held_out(tmp_path, ("a", 0, 0, [1] * 400))
    read_rows(tmp_path, {"id": "a", "input_ids": [1] * 400}, {"id": "b", "input_ids": [1] * 10})
    path = f"{tmp_path}/prompts.jsonl"

    def lengths(new_tokens: int, path: str | None, num_drafts: int = 1) -> list[int]:
        settings = AcceptanceConfig(prompt_tokens=400, max_new_tokens=new_tokens, prompts_file=path)
        settings.num_speculative_tokens = num_drafts
        prompts_dir = tmp_path / ("none" if path else ".")
        found = read_prompts(settings, PromptsConfig(), TargetFiles(tiny_target), prompts_dir, 10)
        return [len(ids) for ids in found.input_ids.values()]

    assert lengths(102, path, 102) == [400, 10] and lengths(102, None) == [400]
    spare = "a context of 512 tokens with 10 to spare, but"
    for arguments, message in (
        ((103, path), r"id a: .* context of 512 tokens with 10 to spare, but are 400 \+ 103"),
        ((102, path, 103), r"id a: .*, or drafts, must fit .* with 10 to spare, but are 400 \+ 103"),
        ((103, None), rf"^acceptance\.prompt_tokens: held-out .* of 400 .* room for 103 .* {spare} none of 1 does"),
    ):
        with pytest.raises(UserError, match=message):
            lengths(*arguments)  # type: ignore[arg-type]
