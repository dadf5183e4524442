"""Tests which data, limits, templates and tokenizers `mtptrain prompts` refuses, and that it states the reason."""

import re
from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.config import PipelineConfig
from mtptrain.run_dir import Run
from tests.conftest import GENERATION_TEMPLATE, make_target
from tests.data_prep.prompts.documents import CHATS, ConfigFor, chat, read_texts


def refusal(config: PipelineConfig) -> str:
    with pytest.raises(ValueError) as refused:
        prepare_prompts(Run(config))
    assert not (config.stage_dir("prompts") / "manifest.json").exists()
    return str(refused.value)


def test_settings_and_targets_that_leave_a_split_without_text_are_refused(
    text_config: ConfigFor, tmp_path: Path
) -> None:
    small = make_target(tmp_path / "target", vocab_size=100, eos_token_id=1)
    for override, message in (
        ("prompts.pattern='*.rs'", r"^prompts.pattern: must match a file below .*, but '\*.rs' matches none that "),
        ("prompts.validation_fraction=1e-6", r"\(empty\), .* but validation holds none, of 41 different questions"),
        ("prompts.validation_fraction=0.9999", "but train holds none, of"),
        ("prompts.max_train_tokens=3", r"^prompts.paths: 2 of 43 .*: 1 \(not UTF-8\), 1 \(empty\), the first is \S+;"),
        ("prompts.paths=[]", "must name at least one path with prompts.source=text_files, but is empty; set"),
        (f"target.path={small}", "target.path: token ids must be below the model's vocab_size 100, but file_"),
    ):
        assert re.search(message, refusal(text_config(override)))


def test_conversations_that_cannot_be_trained_on_are_refused(chat_config: ConfigFor, tmp_path: Path) -> None:
    template = "{% if messages[0]['content'].startswith('hello') %}{{ 1 // 0 }}{% endif %}" + GENERATION_TEMPLATE
    failing = make_target(tmp_path / "target", chat_template=template)
    none = "^prompts.paths: 20 of 20 items were refused: 20 "
    for turns, message in (
        (("hello?", "answer {}"), "0 of 20 items .* holds none, of 1 different questions or files, with 0 windows"),
        (("hi {}?", "yes {}"), r"^prompts\.validation_fraction: must .* none of 20; raise it \(1e-06\), or add data"),
        (("hello {}?",), none + r"\(no assistant turn\), the first is \S+:\d+; .*, or let the target answer \("),
        (("hello {}?", "yes"), none + r"\(the chat template fails: ZeroDivisionErr"),
    ):
        rows = [chat(f"chat{i}", *(turn.format(i) for turn in turns)) for i in range(20)]
        target = [f"target.path={failing}"] if "ZeroDiv" in message else []
        target += ["prompts.validation_fraction=1e-6"] if "validation_fraction" in message else []
        assert re.search(message, refusal(chat_config(rows, *target)))


def test_answers_too_short_to_draft_are_refused_before_training(chat_config: ConfigFor, tmp_path: Path) -> None:
    template = GENERATION_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}")
    target = f"target.path={make_target(tmp_path / 'target', chat_template=template)}"
    rows = [chat(f"chat{i}", f"hello {i}?", "y") for i in range(20)]
    message = refusal(chat_config(rows, target))
    assert " in which no token can be drafted, of 20 different questions" in message
    report = prepare_prompts(Run(chat_config([*rows, *CHATS], target)))
    assert report.counts["without_drafts"] == 20


def test_refused_and_untrained_answers_and_dates_are_reported(chat_config: ConfigFor, tmp_path: Path) -> None:
    row = chat("mixed", "a?", "SKIP", "b?", "keep")
    row["messages"][1]["weight"], row["messages"][0]["role"], row["note"] = 0, "client", "x"
    odd = [{"messages": [{"role": "narrator", "content": "once"}]}, chat("unanswered", "hello?")]
    config = chat_config([*CHATS, *odd, row], "+prompts.roles={client: user}")
    report = prepare_prompts(Run(config))
    assert report.passed_over == ["note"]
    reasons = {group.reason: group.count for group in report.refused}
    assert (reasons, report.counts["items"]) == ({"unknown role 'narrator'": 1, "no assistant turn": 1}, 23)
    assert report.refused[0].first[0].endswith("chats.jsonl:21")
    [(whole, supervised)] = read_texts(config)["mixed"]
    assert "SKIP" in whole and supervised == "keep<|end|>"
    assert report.counts["answers_untrained"] == 1
    target_dir = make_target(tmp_path / "target", chat_template="{{ strftime_now('%Y') }}" + GENERATION_TEMPLATE)
    with pytest.warns(UserWarning, match="today's date"):
        prepare_prompts(Run(chat_config(CHATS, f"target.path={target_dir}")))
