"""Tests that conversations become documents with supervised answers, and that each question is in one split only."""

from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.prompts_report import COUNTS, PromptsReport
from mtptrain.data.conversation import question_group
from mtptrain.data.prompt_files import Split, is_held_out
from mtptrain.run_dir import Run
from tests.conftest import make_target
from tests.data_prep.prompts.documents import CHATS, ConfigFor, chat, read_output, read_texts


def counted(report: PromptsReport, *names: str) -> list[int]:
    assert report.counts.keys() <= COUNTS.keys()
    return [report.counts[name] for name in names]


def test_windows_without_an_answer_are_left_out_and_counted(chat_config: ConfigFor) -> None:
    config = chat_config([*CHATS, chat("long", "q" * 300, "a" * 100)], "prompts.max_document_tokens=64")
    report = prepare_prompts(Run(config))
    windows = read_output(config)["long"]
    assert report.counts["windows_unsupervised"] == 302 // 64 == windows[0][0].window
    assert sum(sum(mask) for _, _, mask in windows) == 101
    assert report.counts["items_cut"] == 1


def test_questions_that_nearly_repeat_each_other_are_on_one_side_and_counted(chat_config: ConfigFor) -> None:
    topics = [" ".join(f"topic{i}word{j}" for j in range(40)) for i in range(30)]
    rows = [chat(f"{i}.{copy}", f"{topics[i]} {copy}", f"answer {copy}") for i in range(30) for copy in range(4)]
    sides: dict[float, list[set[str]]] = {}
    for least in (1.0, 0.8):
        config = chat_config(rows, f"prompts.near_duplicate_similarity={least}")
        report = prepare_prompts(Run(config))
        splits = {name: entry.split for name, [(entry, _, _)] in read_output(config).items()}
        sides[least] = [{splits[f"{i}.{copy}"] for copy in range(4)} for i in range(30)]
    assert len(splits) == 120 and all(len(found) == 1 for found in sides[0.8])
    assert {split for [split] in sides[0.8]} == {"train", "validation"}
    assert sum(len(found) == 2 for found in sides[1.0]) > 10, "without the setting, the copies are on both sides"
    assert counted(report, "questions", "near_duplicates") == [120, 120]


@pytest.fixture
def rewriting_target(tmp_path: Path) -> Path:
    """A target whose chat template shows the reasoning of the last answer alone."""
    answer = "{{ m.content if loop.last else m.content.split('|')[-1] }}"
    text = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}" + answer
    text += "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    text += "{% if add_generation_prompt %}<assistant>{% endif %}"
    return make_target(tmp_path / "rewriting", chat_template=text)


REASON = "so " * 23
ANSWERS = [f"{REASON}|answer {i}" for i in range(3)]
"""Reasoning that is nearly nine times as long as the answer."""


def test_rewritten_answers_are_written_beside_their_conversation_counted_cut_and_limited_as_it_is(
    chat_config: ConfigFor, rewriting_target: Path
) -> None:
    rows = [chat(f"chat{c}", f"what {c:>2}", ANSWERS[0], "go on", ANSWERS[1], "go on", ANSWERS[2]) for c in range(20)]
    target = f"target.path={rewriting_target}"
    config = chat_config(rows, target)
    report = prepare_prompts(Run(config))
    output, texts = read_output(config), read_texts(config)
    middle = "answer 0<|end|><user>go on<|end|><assistant>"
    end = "answer 1<|end|><user>go on<|end|><assistant>"
    generated = [answer + "<|end|>" for answer in ANSWERS]
    for i, row in enumerate(rows):
        side = Split.validation if is_held_out(question_group(row["messages"]), 0.3) else Split.train
        entries = [(entry.window, entry.turn, entry.split) for entry, _, _ in output[f"chat{i}"]]
        assert entries == [(0, 0, side), (0, 4, side), (0, 2, side)]
        beginning = f"<user>what {i:>2}<|end|><assistant>"
        assert texts[f"chat{i}"] == [
            (beginning + middle + end + generated[2], generated[2]),
            (beginning + middle + generated[1], generated[1]),
            (beginning + generated[0], generated[0]),
        ]
    rewritten = sum(entry.tokens for entries in output.values() for entry, _, _ in entries if entry.turn)
    assert counted(report, "rewritten_answers", "rewritten_tokens", "answers_left_out") == [40, rewritten, 0]

    settings = (target, "prompts.max_document_tokens=100")
    config = chat_config(rows, *settings)
    report = prepare_prompts(Run(config))
    windows = read_output(config)["chat0"]
    assert [(entry.turn, entry.window) for entry, _, _ in windows] == [(0, 0), (0, 1), (4, 0), (4, 1), (2, 0)]
    assert report.counts["items_cut"] == 20
    limited = prepare_prompts(Run(chat_config(rows, *settings, "prompts.max_train_tokens=1000")))
    assert 900 < limited.counts["train_tokens"] <= 1000
    kept = {name for name, documents in read_output(config).items() if len(documents) == 5}
    assert limited.counts["beyond_max_train_tokens"] == 20 - len(kept) > 1
