"""Tests which data, limits, templates and tokenizers `mtptrain prompts` refuses, and that it states the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer
from tests.data_prep.prompts.documents import CHATS, ConfigFor, chat, read_output


def test_refused_conversations_are_counted_by_reason(chat_config: Callable[..., PipelineConfig]) -> None:
    odd = [{"messages": [{"role": "narrator", "content": "once"}]}, chat("unanswered", "hello?")]
    report = prepare_prompts(Run(chat_config([*CHATS, *odd])))
    assert {group.reason: group.count for group in report.refused} == {
        "unknown role 'narrator'": 1,
        "no assistant turn": 1,
    }
    assert report.refused[0].first[0].endswith("chats.jsonl:21")


def test_no_paths_are_refused(config_for: ConfigFor) -> None:
    with pytest.raises(
        ValueError, match=r"prompts\.paths: must name at least one path with prompts\.source=text_files, but is empty; "
    ):
        prepare_prompts(Run(config_for("prompts.paths=[]")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "prompts.pattern='*.rs'",
            r"must hold at least one file with text that matches '\*\.rs', but .*/texts holds none; correct the",
        ),
        (
            "prompts.validation_fraction=1e-6",
            r"the validation split must hold at least one document, .*=1e-06 .*: none of \d+ documents belongs to it;",
        ),
        (
            "prompts.validation_fraction=0.9999",
            r"the train split must hold at least one document, but holds none with .*=0\.9999",
        ),
        (
            "prompts.max_train_tokens=3",
            r"the train split must hold .* prompts\.max_train_tokens=3.*; add data or change these settings",
        ),
    ],
)
def test_settings_that_leave_a_split_without_text_are_refused(
    text_config: ConfigFor, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_prompts(Run(text_config(override)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [chat(f"chat{i}", "hello?", f"answer {i}") for i in range(20)],
            r": none of 20 documents \(different questions, near-duplicates left out: 1\) belongs to it; add",
        ),
        (
            [chat(f"chat{i}", f"hello {i}?") for i in range(20)],
            r"^prompts\.paths: conversations must have an answer .* none of 20 has one: .* 20 refused \(no assistant "
            r"turn\); correct the data or the template, or let the target answer \(mtptrain responses",
        ),
        (
            [chat(f"chat{i}", f"hello {i}?", "") for i in range(20)],
            r"none of 20 has one: .* 20 refused \(an answer without text\)",
        ),
    ],
    ids=["one question", "no answers", "empty answers"],
)
def test_conversations_that_cannot_be_trained_on_are_refused(
    chat_config: Callable[..., PipelineConfig], rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_prompts(Run(chat_config(rows)))


@pytest.mark.parametrize("num_files", [2, 40])
def test_files_without_usable_text_are_counted_by_reason(tmp_path: Path, config_for: ConfigFor, num_files: int) -> None:
    for i in range(num_files):
        (tmp_path / f"{i}.py").touch()
    (tmp_path / "latin.py").write_bytes(b"# gr\xf6\xdfe\n")
    with pytest.raises(ValueError) as refused:
        prepare_prompts(Run(config_for(f"prompts.paths=[{tmp_path}]")))
    assert str(refused.value) == (
        f"prompts.paths: must hold at least one file with text that matches '*.py', but {tmp_path} holds none, "
        f"{num_files} refused (empty), 1 refused (not UTF-8); correct the paths, prompts.pattern or the data"
    )


def test_if_every_mask_is_empty_the_error_names_the_target(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig]
) -> None:
    template = "{% if messages[0]['content'].startswith('hello') %}{{ 1 // 0 }}{% endif %}" + GENERATION_TEMPLATE
    target_dir = make_target(tmp_path / "target", chat_template=template)
    rows = [chat(f"chat{i}", f"hello {i}?", "yes") for i in range(20)]
    match = (
        rf"with the chat template of {target_dir} none of 20 has one: .*20 refused \(the chat template fails: ZeroDiv"
    )
    with pytest.raises(ValueError, match=match):
        prepare_prompts(Run(chat_config(rows, f"target.path={target_dir}")))


def test_answers_too_short_to_draft_are_refused_before_training(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig]
) -> None:
    template = GENERATION_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    target_dir = make_target(tmp_path / "target", chat_template=template)
    rows = [chat(f"chat{i}", f"hello {i}?", "y") for i in range(20)]
    match = r"the train split must hold a document in which two generated tokens .* but none of its \d+ documents does"
    with pytest.raises(ValueError, match=match):
        prepare_prompts(Run(chat_config(rows, f"target.path={target_dir}")))
    report = prepare_prompts(Run(chat_config([*rows, *CHATS], f"target.path={target_dir}")))
    assert sum(split.without_drafts for split in report.splits.values()) == 20


def test_answers_that_are_not_to_be_trained_are_counted(chat_config: Callable[..., PipelineConfig]) -> None:
    row = chat("mixed", "a?", "SKIP", "b?", "keep")
    row["messages"][1]["weight"] = 0
    config = chat_config([*CHATS, row])
    report = prepare_prompts(Run(config))
    [(_, ids, mask)] = read_output(config)["mixed"]
    tokenizer = make_tokenizer()
    assert "SKIP" in tokenizer.decode(ids)
    assert tokenizer.decode(np.array(ids)[np.array(mask) == 1]) == "keep<|end|>"
    assert (report.answers_untrained, report.items, report.is_dated) == (1, 21, False)


def test_text_that_the_template_inserts_and_its_date_are_reported(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig]
) -> None:
    template = "{{ strftime_now('%Y') }}" + GENERATION_TEMPLATE.replace(
        "{% generation %}", "{% generation %}<think></think>"
    )
    target_dir = make_target(tmp_path / "target", chat_template=template)
    report = prepare_prompts(Run(chat_config(CHATS, f"target.path={target_dir}")))
    assert (report.answers_inserted, report.is_dated) == (20, True)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, text_config: ConfigFor) -> None:
    target_dir = make_target(tmp_path / "target", vocab_size=100, eos_token_id=1)
    match = (
        r"token ids must be below the model's vocab_size 100, but file_\d+\.py has \d+; the tokenizer, or the data of "
        r"prompts\.source=tokens, belongs to another model"
    )
    with pytest.raises(ValueError, match=match):
        prepare_prompts(Run(text_config(f"target.path={target_dir}")))
