"""Tests the documents made from answers that the chat template renders differently once later turns follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prompts import prepare_prompts
from data_prep.prompts_report import RewrittenReport
from mtptrain.config import PipelineConfig
from mtptrain.data.conversation import question_group
from mtptrain.data.prompt_files import Split, is_held_out
from mtptrain.run import Run
from tests.conftest import make_target, make_tokenizer
from tests.data_prep.prompts.documents import chat, read_output


@pytest.fixture
def rewriting_target(tmp_path: Path) -> Path:
    """A target whose chat template shows the reasoning of the last answer alone."""
    answer = "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}"
    text = "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}" + answer
    text += (
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return make_target(tmp_path / "rewriting", chat_template=text)


def reasoned_chats(num_turns: int) -> list[dict[str, Any]]:
    """Returns conversations whose reasoning is nearly nine times as long as the answers."""
    turns = [(f"question {i}", f"{'so ' * 23}|answer {i}") for i in range(num_turns)]
    return [
        chat(f"chat{c}", f"question {chr(97 + c)}", turns[0][1], *(text for turn in turns[1:] for text in turn))
        for c in range(20)
    ]


def test_rewritten_answers_are_written_beside_their_conversation_on_its_side(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    rows = reasoned_chats(3)
    config = chat_config(rows, f"target.path={rewriting_target}")
    prepare_prompts(Run(config))
    tokenizer, output = make_tokenizer(), read_output(config)
    for i, row in enumerate(rows):
        documents = output[f"chat{i}"]
        assert [(entry.window, entry.turn) for entry, _, _ in documents] == [(0, 0), (0, 4), (0, 2)]
        side = Split.validation if is_held_out(question_group(row["messages"]), 0.3) else Split.train
        assert {entry.split for entry, _, _ in documents} == {side}
        assert [tokenizer.decode(np.array(ids)[np.array(mask) == 1]) for _, ids, mask in documents] == [
            f"{'so ' * 23}|answer {turn}<|end|>" for turn in (2, 1, 0)
        ]
        beginning = f"<user>{row['messages'][0]['content']}<|end|><assistant>answer 0<|end|><user>question 1"
        assert tokenizer.decode(documents[1][1]).startswith(beginning)


def test_the_report_says_what_rewritten_answers_cost(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    report = prepare_prompts(Run(chat_config(reasoned_chats(3), f"target.path={rewriting_target}")))
    question, answer, generated = 10 + 2, 8 + 2, 23 * 3 + 1 + 8 + 1
    history = [
        (question + answer) * i + question + 1 for i in range(3)
    ]  # includes the `<assistant>` token that starts the answer
    assert report.rewritten == RewrittenReport(
        answers=40, documents=40, tokens=20 * (sum(history[:2]) + 2 * generated), history_tokens=20 * sum(history[:2])
    )
    assert report.answers_left_out == 0
    total = sum(split.tokens for split in report.splits.values())
    assert total == report.rewritten.tokens + 20 * (history[2] + generated)
    assert sum(split.supervised_tokens for split in report.splits.values()) == 20 * 3 * generated


def test_a_conversation_that_nothing_rewrites_stores_no_history_again(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    config = chat_config(reasoned_chats(3))
    report = prepare_prompts(Run(config))
    assert report.rewritten == RewrittenReport(answers=0, documents=0, tokens=0, history_tokens=0)
    assert all(len(documents) == 1 for documents in read_output(config).values())


def test_rewritten_answers_are_cut_and_limited_as_their_conversation_is(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    settings = (f"target.path={rewriting_target}", "prompts.max_document_tokens=100")
    config = chat_config(reasoned_chats(3), *settings)
    report = prepare_prompts(Run(config))
    assert report.items_cut == 20
    lengths = [(12 + 10) * i + 13 + 79 for i in range(3)]
    assert report.windows_cut == 20 * sum(-(-length // 100) for length in lengths if length > 100)
    windows = read_output(config)["chat0"]
    assert [(entry.turn, entry.window) for entry, _, _ in windows] == [(0, 0), (0, 1), (4, 0), (4, 1), (2, 0)]
    assert report.rewritten.documents == 20 * 3
    limited = prepare_prompts(Run(chat_config(reasoned_chats(3), *settings, "prompts.max_train_tokens=1000")))
    assert 900 < limited.splits[Split.train].tokens <= 1000
    kept = {name for name, documents in read_output(config).items() if len(documents) == 5}
    assert limited.beyond_max_train_tokens == 20 - len(kept) > 0
    assert limited.splits[Split.validation] == report.splits[Split.validation]
