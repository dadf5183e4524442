"""Tests which prompts acceptance is measured on."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtptrain.config import AcceptanceConfig, PipelineConfig
from mtptrain.data.conversation import question_group
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split
from mtptrain.decoding.prompts import (
    HeldOut,
    held_out_documents,
    held_out_prompts,
    read_prompts,
    warn_of_trained_questions,
)
from mtptrain.decoding.prompts_file import read_prompts_file
from mtptrain.run import Run
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_tokenizer
from tests.sealed import seal_prompts

DOCUMENTS = Documents.from_list(
    [
        (0, list(range(100)), [1] * 100),
        (1, list(range(50)), [1] * 50),
        (2, list(range(30)), [0] * 12 + [1] * 18),
        (3, list(range(300)), [0] * 290 + [1] * 10),
    ]
)


def test_a_conversation_is_cut_before_its_first_answer_and_a_text_after_the_prompt_length() -> None:
    prompts = held_out_prompts(DOCUMENTS, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128)
    # Document 1 is too short, and document 3 is too long.
    assert {name: len(prompt) for name, prompt in prompts.items()} == {"0": 64, "2": 12}
    assert prompts == held_out_prompts(
        DOCUMENTS, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128
    )


def write_held_out(directory: Path, *documents: tuple[str, int, int, list[int]]) -> Path:
    """Writes a held-out split from (name, window, turn, loss mask)."""
    directory.mkdir(exist_ok=True)
    entries = [
        DocumentEntry(i, name, Split.validation, len(mask), w, t) for i, (name, w, t, mask) in enumerate(documents)
    ]
    DocumentEntry.write_all(directory, entries)
    split = [(i, np.arange(len(mask)) + 100 * i, mask) for i, (_, _, _, mask) in enumerate(documents)]
    Documents.from_list(split).save(directory / "validation.safetensors")
    seal_prompts(directory)
    return directory


CHOOSING = ("choosing", 0, 0, [0] * 9 + [1])
"""A document by which the best head is chosen, beside others whose names are in the part that is reported."""


def test_a_conversation_gives_the_prompt_of_its_first_answer_alone(tmp_path: Path) -> None:
    prompts_dir = write_held_out(
        tmp_path,
        ("rewritten", 0, 0, [0] * 40 + [1] * 10),
        ("rewritten", 0, 4, [0] * 25 + [1] * 10),
        ("rewritten", 0, 2, [0] * 10 + [1] * 10),
        ("one", 0, 0, [0] * 12 + [1] * 18),
        CHOOSING,
    )
    documents = held_out_documents(prompts_dir, HeldOut.reporting)
    prompts = held_out_prompts(documents, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128)
    assert {name: (prompt[0], len(prompt)) for name, prompt in prompts.items()} == {"2": (200, 10), "3": (300, 12)}


def test_no_prompt_begins_in_the_middle_of_a_conversation(tmp_path: Path) -> None:
    prompts_dir = write_held_out(
        tmp_path,
        ("cut", 0, 0, [0] * 90 + [1] * 10),
        ("cut", 1, 0, [0] * 20 + [1] * 80),
        ("cut", 2, 0, [1] * 100),
        ("long question", 1, 0, [0] * 5 + [1] * 20),
        CHOOSING,
    )
    assert held_out_documents(prompts_dir, HeldOut.reporting).document_ids.tolist() == [0]


def test_conversations_without_an_answer_in_their_first_window_are_refused_with_the_setting_that_helps(
    tmp_path: Path,
) -> None:
    without = ("long question", 1, 0, [0] * 5 + [1] * 20), ("another", 2, 0, [0, 1])
    prompts_dir = write_held_out(tmp_path, *without, CHOOSING)
    message = (
        r"prompts\.max_document_tokens: the first window of .* must hold its first answer, but none of the 2 does; "
        r"raise it"
    )
    with pytest.raises(ValueError, match=message):
        held_out_documents(prompts_dir, HeldOut.reporting)


def test_every_window_of_a_text_may_give_a_prompt(tmp_path: Path) -> None:
    prompts_dir = write_held_out(tmp_path, ("a", 0, 0, [1] * 100), ("a", 1, 0, [1] * 100))
    assert held_out_documents(prompts_dir, HeldOut.reporting).document_ids.tolist() == [0, 1]


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
    entries = [DocumentEntry(i, f"abc_{i}", Split.validation, 20, 0, 0, f"question {i % 40}") for i in range(400)]
    DocumentEntry.write_all(tmp_path, entries)
    Documents.from_list([(i, np.arange(20), [0] * 10 + [1] * 10) for i in range(400)]).save(
        tmp_path / "validation.safetensors"
    )
    seal_prompts(tmp_path)
    parts = {part: [entries[i].group for i in held_out_documents(tmp_path, part).document_ids] for part in HeldOut}
    assert all(len(groups) == len(set(groups)) for groups in parts.values())
    assert not set(parts[HeldOut.choosing]) & set(parts[HeldOut.reporting])
    assert sorted(parts[HeldOut.choosing] + parts[HeldOut.reporting]) == sorted({entry.group for entry in entries})
    assert len(parts[HeldOut.choosing] + parts[HeldOut.reporting]) == 40


def test_two_files_are_enough_and_one_is_not(tmp_path: Path) -> None:
    two = write_held_out(tmp_path / "two", ("a", 0, 0, [1] * 10), ("b", 0, 0, [1] * 10))
    assert [len(held_out_documents(two, part)) for part in (HeldOut.choosing, HeldOut.reporting)] == [1, 1]
    one = write_held_out(tmp_path / "one", ("a", 0, 0, [1] * 10))
    assert len(held_out_documents(one, HeldOut.reporting)) == 1
    with pytest.raises(
        ValueError, match=r"prompts\.validation_fraction: must hold out at least 2 files or questions, .* holds out 1;"
    ):
        held_out_documents(one, HeldOut.choosing)


def test_a_prompts_file_takes_token_ids_text_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "input_ids": [1, 2, 3]},
        {"id": 7, "text": "def f"},
        {"id": "c", "messages": [{"role": "user", "content": "hi"}]},
        {"question_id": 81, "category": "writing", "turns": ["hello", "shorter"]},
        {"id": None, "question_id": 82, "category": None, "text": "def f", "messages": None},
        {"id": "flags", "text": "hi", "weight": 0, "train": False},  # say that a row is not to be trained
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tokenizer = make_tokenizer()
    read = read_prompts_file(path, tokenizer, 260)
    prompts = read.input_ids
    assert list(prompts) == ["a", "7", "c", "81", "82", "flags"]
    assert prompts["a"] == [1, 2, 3]
    assert tokenizer.decode(prompts["7"]) == "def f"
    assert tokenizer.decode(prompts["c"]) == "<user>hi<|end|><assistant>"
    assert tokenizer.decode(prompts["81"]) == "<user>hello<|end|><assistant>"
    assert read.categories == {"81": "writing"} and read.turns == {"81": ["hello", "shorter"]}


def test_prompts_of_a_file_that_were_trained_on_are_counted_in_a_warning(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmark prompts may be in the training data."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "turns", "turns": ["Trained  ON?", "more"]},
        {
            "id": "messages",
            "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "trained on?"}],
        },
        {"id": "JSON", "messages": json.dumps([{"role": "user", "content": "trained on?"}])},
        {"id": "ShareGPT", "messages": [{"from": "human", "value": "trained on?"}]},
        {"id": "part", "messages": [{"role": "user", "content": [{"type": "text", "text": "trained on?"}]}]},
        {"id": "held out", "turns": ["held out?"]},
        {"id": "new", "turns": ["new?"]},
        {"id": "text", "text": "trained on?"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = read_prompts_file(path, make_tokenizer(), 260).questions
    system = {"role": "system", "content": "Be brief."}
    groups = [question_group([system, {"role": "user", "content": text}]) for text in ("trained on?", "held out?")]
    warn_of_trained_questions(questions, tmp_path)  # must not warn, because stage 1 has not run
    entries = [
        DocumentEntry(i, f"chat{i}", split, 9, 0, 0, groups[i])
        for i, split in enumerate((Split.train, Split.validation))
    ]
    DocumentEntry.write_all(tmp_path, entries)
    seal_prompts(tmp_path)
    with monkeypatch.context() as second_rank:
        second_rank.setenv("RANK", "1")
        warn_of_trained_questions(questions, tmp_path)
    assert not user_warnings
    counted = r"5 of 7 are \(ids turns, messages, JSON, ShareGPT, part\); their accept"
    with pytest.warns(UserWarning, match=rf"first turns should not be .*, but {counted}"):
        warn_of_trained_questions(questions, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"must hold at least one prompt, but is empty; add lines with `id` and `text`"),
        ('{"id": 1, "text": "a"}\n{oops', r":2: must be JSON, but is not \("),
        (
            '{"id": 1}',
            r":1: a line must have `id` and exactly one of `input_ids`, `text`, `messages`, `turns`, but has \['id'\]",
        ),
        ('{"id": null, "text": "a"}', r":1: a line must have `id` .* but has \['text'\]"),
        ("[1]", r":1: a line must have `id` .* but has list"),
        ('{"id": 1, "text": "a", "input_ids": [1]}', r"but has \['id', 'input_ids', 'text'\]"),
        ('{"id": 1, "turns": []}', r":1: turns must be a list of at least one string, but is \[\]; correct it"),
        (
            '{"id": 1, "turns": ["a", 2]}',
            r":1: turns must be a list of at least one string, but is \['a', 2\]; correct it",
        ),
        ('{"id": [1], "text": "a"}', r":1: id must be a string or an integer, but is \[1\]; correct it"),
        ('{"question_id": true, "text": "a"}', ":1: question_id must be a string or an integer, but is True"),
        ('{"id": 1, "input_ids": "abc"}', r":1: input_ids must be a list of integers, but is abc"),
        ('{"id": 1, "input_ids": [1, 999]}', r":1: tokens must be in the target's vocabulary of 260, but one is 999"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', r":2: ids must be unique, but '1' occurs twice"),
        pytest.param("[" * 10**5 + "]" * 10**5, ":1: must be JSON, but is nested too deep to be read", id="nested"),
        pytest.param('{"id": ' + "1" * 5000 + "}", r":1: must be JSON, but is not \(Exceeds the limit", id="digits"),
        ('{"id": 1, "turns": ["\\ud83d"]}', r":1: texts must be valid Unicode, .*\\ud83d.*; correct"),
        ('{"id": 1, "text": "in UTF-16"}\n{"id": 2, "text": "b"}', ":1: must be UTF-8, but is not"),
        ('{"id": 1, "text": "a"}\n{"id": 2, "text": "\xf6"}', r":2: must be UTF-8, but is not \('utf-8' codec"),
    ],
)
def test_a_bad_prompts_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-16" if "UTF-16" in content else "latin-1")
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        read_prompts_file(path, make_tokenizer(), 260)


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": HI, "tools": [{"name": "f"}]}, "tools that the chat template does not render"),
        ({"messages": HI, "enable_thinking": False}, "column enable_thinking, which may change what is trained"),
        ({"turns": ["hi"], "system": "Talk like a pirate."}, "column system, which may hold a system prompt"),
        ({"text": "hi", "image": "a.png"}, "column image, which may hold images, audio or video"),
        ({"messages": [{"role": "user", "content": "<image>what?"}]}, "images, audio or video"),
        ({"messages": [*HI, {"role": "assistant", "content": "yes"}]}, "an answer as its last message"),
        ({"messages": [{"role": "user", "content": None}]}, "content must be text, but is null"),
    ],
)
def test_a_prompt_that_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, row: dict[str, object], reason: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": 1, **row}))
    with pytest.raises(ValueError, match=rf"^{path}:1: must be read as a whole, but cannot be: {reason}.*; correct"):
        read_prompts_file(path, make_tokenizer(), 260)


def test_a_system_prompt_in_a_column_is_honoured_and_other_columns_may_describe_the_line(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "prompts.jsonl", make_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    rows = [
        {"id": 1, "messages": HI, "system": "Be brief.", "category": "qa", "reference": ["yes"], "source": "x"},
        {"id": 2, "messages": messages},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_prompts_file(path, tokenizer, 260).input_ids
    assert read["1"] == read["2"] and "Be brief." in tokenizer.decode(read["1"])


def test_columns_keys_and_roles_that_the_settings_name_are_read_as_in_training_data(
    config_for: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    path = tmp_path / "asked.jsonl"
    rows = [
        {"id": 1, "mask": "x", "messages": [{"role": "client", "content": "hi", "name": "ann"}]},
        {"id": 2, "mask": "x", "turns": ["hi"]},
        {"id": 3, "mask": "x", "text": "<user>hi<|end|><assistant>"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    named = ("prompts.metadata=[mask,name]", "+prompts.roles.client=user", "prompts.schema=sharegpt")
    config = config_for(f"acceptance.prompts_file={path}", "acceptance.max_new_tokens=8", *named)
    read = Run(config).measured_prompts()
    assert read.input_ids["1"] == read.input_ids["2"] == read.input_ids["3"]
    config.prompts.metadata.remove("mask")
    message = r":1: must be .*column mask, .*\(add mask to prompts\.metadata to pass it over\)"
    with pytest.raises(UserError, match=message):
        Run(config).measured_prompts()


def test_a_prompts_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.touch()
    os.truncate(path, 2**30 + 1)
    with pytest.raises(ValueError, match=rf"^{path}: must have at most 1,073,741,824 bytes, but has 1,073,741,825; "):
        read_prompts_file(path, make_tokenizer(), 260)


@pytest.mark.parametrize(("path", "does"), [("/", "is not a"), ("/dev/null", "is not a"), ("/none", "does not exist")])
def test_a_prompts_file_that_is_not_a_file_is_told_from_a_missing_one(path: str, does: str) -> None:
    with pytest.raises(UserError, match=rf"^acceptance\.prompts_file: must be a jsonl file, but {path} {does}.*; cor"):
        read_prompts_file(Path(path), make_tokenizer(), 260)


def test_prompts_that_leave_no_tokens_to_spare_are_refused_with_the_targets_own_context(
    tmp_path: Path, tiny_target: Path
) -> None:
    """The tiny target's context has 512 tokens, of which a caller keeps 10 free."""
    write_held_out(tmp_path, ("a", 0, 0, [1] * 400))
    path, target = tmp_path / "prompts.jsonl", TargetFiles(tiny_target)
    prompts = {"a": [1] * 400, "b": [1] * 10}
    path.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in prompts.items()))
    from_file = AcceptanceConfig(prompts_file=str(path), max_new_tokens=102, num_speculative_tokens=102)
    assert read_prompts(from_file, target, tmp_path / "none", spare_tokens=10).input_ids == prompts
    message = (
        r"id a: prompt and answer must fit the target's context of 512 tokens with 10 to spare, but are 400 \+ 103"
    )
    with pytest.raises(UserError, match=message):
        read_prompts(replace(from_file, max_new_tokens=103), target, tmp_path / "none", spare_tokens=10)
    message = (
        r"^acceptance\.num_speculative_tokens: must be at most 102, so that the drafts after the longest prompt of 400 "
        "tokens fit a context of 512 tokens with 10 to spare, but is 103; lower it"
    )
    with pytest.raises(UserError, match=message):
        read_prompts(replace(from_file, num_speculative_tokens=103), target, tmp_path / "none", spare_tokens=10)
    from_documents = AcceptanceConfig(prompt_tokens=400, max_new_tokens=102)
    assert len(read_prompts(from_documents, target, tmp_path, spare_tokens=10).input_ids["0"]) == 400
    message = (
        r"^acceptance\.prompt_tokens: held-out documents must hold a prompt of 400 tokens .* leaves room for 103 new "
        "tokens in a context of 512 tokens with 10 to spare, but none of 1 does"
    )
    with pytest.raises(UserError, match=message):
        read_prompts(replace(from_documents, max_new_tokens=103), target, tmp_path, spare_tokens=10)


@pytest.mark.parametrize("document_id", [-1, 7])
def test_a_document_without_a_line_of_its_own_is_refused(tmp_path: Path, document_id: int) -> None:
    prompts_dir = write_held_out(tmp_path, ("a", 0, 0, [1, 1]))
    Documents.from_list([(document_id, [1, 2], [1, 1])]).save(prompts_dir / "validation.safetensors")
    seal_prompts(prompts_dir)
    with pytest.raises(
        ValueError,
        match=rf"validation\.safetensors: document_ids must be .* 1 lines of .*, but one is {document_id}; run",
    ):
        held_out_documents(prompts_dir, HeldOut.reporting)
