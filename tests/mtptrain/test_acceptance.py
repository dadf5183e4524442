"""Counts to lengths and rates, loops, and the prompts that acceptance is measured on."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mtptrain.acceptance import has_loop, held_out_documents, held_out_prompts, intervals, read_notes, read_prompts_file, summarise
from mtptrain.prompt_files import DocumentEntry, Documents, Split
from mtptrain.speculate import Generation
from tests.conftest import make_tokenizer


def generation(rounds: int, accepted_at: list[int], empty_rounds: int = 0) -> Generation:
    return Generation([1], rounds, empty_rounds, rounds * len(accepted_at), accepted_at)


def test_counts_are_pooled_over_prompts_and_divided_once() -> None:
    found = summarise([generation(10, [9, 6, 3]), generation(2, [0, 0, 0])])
    assert found.acceptance_length == 1 + 18 / 12
    assert found.acceptance_rate == 18 / 36
    assert found.acceptance_rate_at == [9 / 12, 6 / 12, 3 / 12]
    assert found.acceptance_length_mean_of_prompts == (1 + 1.8 + 1) / 2
    assert (found.rounds, found.drafted, found.accepted, found.prompts) == (12, 36, 18, 2)


def test_rounds_without_a_draft_lower_the_tokens_per_step_only() -> None:
    found = summarise([generation(10, [5], empty_rounds=10)])
    assert (found.acceptance_length, found.tokens_per_step) == (1.5, 1.25)


def test_nothing_generated_is_a_length_of_one() -> None:
    assert summarise([generation(0, [0, 0])]).acceptance_length == 1.0


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        (list(range(40)), False),
        ([5, 4, 3, *[1, 2, 3, 4, 5, 6] * 6], True),
        ([*list(range(20)) * 2, 99], False),
        (list(range(20)) * 3, True),
        ([], False),
    ],
)
def test_a_loop_is_a_block_that_follows_itself_twice_over_32_tokens(tokens: list[int], is_loop: bool) -> None:
    assert has_loop(tokens) is is_loop


DOCUMENTS = Documents.from_list(
    [
        (0, list(range(100)), [1] * 100),
        (1, list(range(50)), [1] * 50),
        (2, list(range(30)), [0] * 12 + [1] * 18),
        (3, list(range(300)), [0] * 290 + [1] * 10),
    ]
)


def test_a_conversation_is_cut_before_its_first_answer_and_a_text_behind_the_prompt_length() -> None:
    prompts = held_out_prompts(DOCUMENTS, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128)
    assert {name: len(prompt) for name, prompt in prompts.items()} == {"0": 64, "2": 12}  # 1 is too short, 3 too long
    assert prompts == held_out_prompts(DOCUMENTS, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128)


def write_held_out(directory: Path, *documents: tuple[str, int, int, list[int]]) -> Path:
    """A held-out split of (name, window, turn, loss mask)."""
    entries = [DocumentEntry(i, name, Split.validation, len(mask), w, t) for i, (name, w, t, mask) in enumerate(documents)]
    DocumentEntry.write_all(directory, entries)
    split = [(i, np.arange(len(mask)) + 100 * i, mask) for i, (_, _, _, mask) in enumerate(documents)]
    Documents.from_list(split).save(directory / "validation.safetensors")
    return directory


def test_a_conversation_gives_the_prompt_of_its_first_answer_alone(tmp_path: Path) -> None:
    prompts_dir = write_held_out(
        tmp_path,
        ("rewritten", 0, 0, [0] * 40 + [1] * 10),
        ("rewritten", 0, 4, [0] * 25 + [1] * 10),
        ("rewritten", 0, 2, [0] * 10 + [1] * 10),
        ("one", 0, 0, [0] * 12 + [1] * 18),
    )
    documents = held_out_documents(prompts_dir)
    prompts = held_out_prompts(documents, num_prompts=10, prompt_tokens=64, max_new_tokens=32, context_tokens=128)
    assert {name: (prompt[0], len(prompt)) for name, prompt in prompts.items()} == {"2": (200, 10), "3": (300, 12)}


def test_no_prompt_begins_in_the_middle_of_a_conversation(tmp_path: Path) -> None:
    prompts_dir = write_held_out(
        tmp_path,
        ("cut", 0, 0, [0] * 90 + [1] * 10),
        ("cut", 1, 0, [0] * 20 + [1] * 80),
        ("cut", 2, 0, [1] * 100),
        ("long question", 1, 0, [0] * 5 + [1] * 20),
    )
    assert held_out_documents(prompts_dir).document_ids.tolist() == [0]


def test_conversations_whose_answers_all_lie_behind_their_first_window_are_refused_with_the_setting_that_helps(
    tmp_path: Path,
) -> None:
    prompts_dir = write_held_out(tmp_path, ("long question", 1, 0, [0] * 5 + [1] * 20), ("another", 2, 0, [0, 1]))
    message = r"prompts\.max_document_tokens: the first window of .* must hold its first answer, but none of 2 does; raise it"
    with pytest.raises(ValueError, match=message):
        held_out_documents(prompts_dir)


def test_every_window_of_a_text_may_give_a_prompt(tmp_path: Path) -> None:
    prompts_dir = write_held_out(tmp_path, ("a", 0, 0, [1] * 100), ("a", 1, 0, [1] * 100))
    assert held_out_documents(prompts_dir).document_ids.tolist() == [0, 1]


def test_no_prompt_at_all_is_an_error() -> None:
    message = r"acceptance\.prompt_tokens: held-out documents must hold a prompt of 200 tokens .* none of 1 does"
    text = Documents.from_list([(0, list(range(100)), [1] * 100)])
    with pytest.raises(ValueError, match=message):
        held_out_prompts(text, num_prompts=10, prompt_tokens=200, max_new_tokens=32, context_tokens=128)


def test_a_prompts_file_takes_token_ids_text_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "input_ids": [1, 2, 3]},
        {"id": 7, "text": "def f"},
        {"id": "c", "messages": [{"role": "user", "content": "hi"}]},
        {"question_id": 81, "category": "writing", "turns": ["hello", "shorter"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tokenizer = make_tokenizer()
    prompts = read_prompts_file(path, tokenizer, 260)
    assert list(prompts) == ["a", "7", "c", "81"]
    assert prompts["a"] == [1, 2, 3]
    assert tokenizer.decode(prompts["7"]) == "def f"
    assert tokenizer.decode(prompts["c"]) == "<user>hi<|end|><assistant>"
    assert tokenizer.decode(prompts["81"]) == "<user>hello<|end|><assistant>"
    notes = read_notes(path)
    assert notes.categories == {"81": "writing"} and notes.turns == {"81": ["hello", "shorter"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"must hold at least one prompt, but is empty; add lines with `id` and `text`"),
        ('{"id": 1, "text": "a"}\n{oops', r":2: a line must be JSON, but is not \("),
        ('{"id": 1}', r":1: a line must have `id` and one of `input_ids`, `text`, `messages`, `turns`, but has \['id'\]"),
        ('{"text": "a"}', r":1: a line must have `id` .* but has \['text'\]"),
        ("[1]", r":1: a line must have `id` .* but has list"),
        ('{"id": 1, "text": "a", "input_ids": [1]}', r"but has \['id', 'input_ids', 'text'\]"),
        ('{"id": 1, "turns": []}', r":1: turns must be a list of at least one string, but is \[\]; correct it"),
        ('{"id": 1, "turns": ["a", 2]}', r":1: turns must be a list of at least one string, but is \['a', 2\]; correct it"),
        ('{"id": 1, "input_ids": "abc"}', r":1: input_ids must be a list of integers, but is abc"),
        ('{"id": 1, "input_ids": [1, 999]}', r":1: tokens must lie in the target's vocabulary of 260, but one is 999"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', r":2: ids must be unique, but '1' stands twice"),
    ],
)
def test_a_bad_prompts_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts_file(path, make_tokenizer(), 260)


def test_a_missing_prompts_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"acceptance.prompts_file: must be a jsonl file, but {path} does not exist")
    ):
        read_prompts_file(path, make_tokenizer(), 260)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(ValueError, match="chat template"):
        read_prompts_file(path, make_tokenizer(chat_template=None), 260)


def test_intervals_hold_the_figure_and_are_those_of_drawing_prompts_anew() -> None:
    """The mean of n lengths has a standard error of sd / sqrt(n): where rounds are equal, the interval is 1.96 of it to each side."""
    rng = np.random.default_rng(1)
    generations = [Generation([], 10, 0, 20, [int(count), 0]) for count in rng.binomial(10, 0.6, size=200)]
    alone = [[generation] for generation in generations]
    found, pooled = intervals(alone), summarise(generations)
    low, high = found.acceptance_length
    error = np.std([sum(each.accepted_at) / 10 for each in generations]) / len(generations) ** 0.5
    assert (pooled.acceptance_length - low, high - pooled.acceptance_length) == pytest.approx(
        (1.96 * error, 1.96 * error), rel=0.15
    )
    assert found.acceptance_rate_at[0] == pytest.approx((low - 1, high - 1)) and found.acceptance_rate_at[1] == (0.0, 0.0)
    assert found.tokens_per_step == found.acceptance_length
    assert intervals(alone) == found, "the same seed gives the same interval"
    twice = intervals([answers * 2 for answers in alone])
    assert twice.acceptance_length == pytest.approx((low, high)), "a conversation of two like answers tells no more than one"
