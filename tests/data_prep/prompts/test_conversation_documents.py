"""Tests that conversations become documents with supervised answers, and that each question is in one split only."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from data_prep.prompts import prepare_prompts
from data_prep.prompts_report import DuplicatesReport
from mtptrain.config import PipelineConfig
from mtptrain.data.prompt_files import Split
from mtptrain.run import Run
from tests.conftest import make_tokenizer
from tests.data_prep.prompts.documents import CHATS, chat, read_output


def test_the_training_limit_stops_the_tokenizing_of_a_large_source(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    rows = [chat(f"chat{i}", f"question {i}", "answer" if i % 4 else "") for i in range(400)]
    report = prepare_prompts(Run(chat_config(rows, "prompts.max_train_tokens=200")))
    train, validation = report.splits[Split.train], report.splits[Split.validation]
    refused = sum(group.count for group in report.refused)
    assert 0 < train.tokens <= 200
    assert 0 < refused < 100, "an empty answer is refused only where it is tokenized"
    assert train.documents + validation.documents + refused + report.beyond_max_train_tokens == 400


def test_conversations_are_written_with_the_answers_supervised(chat_config: Callable[..., PipelineConfig]) -> None:
    config = chat_config(CHATS)
    prepare_prompts(Run(config))
    tokenizer, output = make_tokenizer(), read_output(config)
    assert len(output) == 20
    for i in range(20):
        [(_, ids, mask)] = output[f"chat{i}"]
        assert tokenizer.decode(ids) == f"<user>question {i}<|end|><assistant>answer {i}<|end|>"
        assert tokenizer.decode(np.array(ids)[np.array(mask) == 1]) == f"answer {i}<|end|>"


def splits_of_questions(config: PipelineConfig) -> dict[str, set[Split]]:
    """Returns, for each first question as the target reads it, the splits that its documents are in."""
    tokenizer, sides = make_tokenizer(), defaultdict[str, set[Split]](set)
    for windows in read_output(config).values():
        for entry, ids, _ in windows:
            sides[tokenizer.decode(ids).split("<assistant>")[0]].add(entry.split)
    return sides


def test_one_question_falls_on_one_side_whatever_its_ids_and_answers_are(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    """Regression test: rows used to be split by their ids (abc_0, ...), which put 20 questions into both splits."""
    rows = [chat(f"abc_{i}", f"question {i % 20}", f"answer {i}") for i in range(400)]
    config = chat_config(rows)
    prepare_prompts(Run(config))
    sides = splits_of_questions(config)
    assert len(sides) == 20 and all(len(split) == 1 for split in sides.values())
    assert {split for side in sides.values() for split in side} == set(Split)


def test_documents_that_render_alike_are_kept_once_and_counted(chat_config: Callable[..., PipelineConfig]) -> None:
    rows = [*CHATS, *({"messages": row["messages"]} for row in CHATS * 2), chat("other answer", "question 0", "no")]
    config = chat_config(rows)
    report = prepare_prompts(Run(config))
    texts = [tuple(ids) for windows in read_output(config).values() for _, ids, _ in windows]
    assert len(texts) == len(set(texts)) == 21
    assert report.duplicates == DuplicatesReport(questions=20, largest=4, same_question=41, dropped=40)


def test_windows_without_an_answer_are_left_out_and_counted(chat_config: Callable[..., PipelineConfig]) -> None:
    rows = [*CHATS, chat("long", "q" * 300, "a" * 100)]
    config = chat_config(rows, "prompts.max_document_tokens=64")
    report = prepare_prompts(Run(config))
    windows = read_output(config)["long"]
    assert report.windows_unsupervised == 302 // 64 == windows[0][0].window
    assert sum(sum(mask) for _, _, mask in windows) == 101
    assert (report.items_cut, report.windows_cut) == (1, -(-404 // 64))


def test_questions_that_nearly_repeat_each_other_are_on_one_side_and_counted(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    topics = [" ".join(f"topic{i}word{j}" for j in range(40)) for i in range(30)]
    rows = [
        chat(f"{i}.{copy}", f"{topic} {copy}", f"answer {copy}") for i, topic in enumerate(topics) for copy in range(4)
    ]
    sides: dict[float, list[set[str]]] = {}
    for least in (1.0, 0.8):
        config = chat_config(rows, f"prompts.near_duplicate_similarity={least}")
        report = prepare_prompts(Run(config))
        splits = {name: entry.split for name, [(entry, _, _)] in read_output(config).items()}
        sides[least] = [{splits[f"{i}.{copy}"] for copy in range(4)} for i in range(30)]
    assert len(splits) == 120 and all(len(found) == 1 for found in sides[0.8])
    assert {split for [split] in sides[0.8]} == {"train", "validation"}
    assert sum(len(found) == 2 for found in sides[1.0]) > 10, "without the setting, the copies are on both sides"
    assert (report.duplicates.questions, report.duplicates.near) == (120, 120)
    assert report.duplicates.near_moved > 10
