"""Tests which data, limits, templates and tokenizers `mtptrain prompts` refuses, and that it states the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from tests.conftest import GENERATION_TEMPLATE, make_target
from tests.data_prep.prompts.documents import CHATS, ConfigFor, chat, read_texts

ChatConfig = Callable[..., PipelineConfig]


def refusal(config: PipelineConfig) -> str:
    with pytest.raises(ValueError) as refused:
        prepare_prompts(Run(config))
    return str(refused.value)


def test_settings_and_targets_that_leave_nothing_or_a_split_without_text_are_refused(
    text_config: ConfigFor, tmp_path: Path
) -> None:
    small = make_target(tmp_path / "target", vocab_size=100, eos_token_id=1)
    for override, message in (
        ("prompts.pattern='*.rs'", "must hold at least one file with text that matches '*.rs', but "),
        ("prompts.validation_fraction=1e-6", "the validation split must hold at least one document, but holds none"),
        ("prompts.validation_fraction=0.9999", "the train split must hold at least one document, but holds none"),
        (
            "prompts.max_train_tokens=3",
            "files: 0 windows without a supervised token, 1 refused (not UTF-8), 1 refused (empty); add data or change",
        ),
        ("prompts.paths=[]", "must name at least one path with prompts.source=text_files, but is empty; set"),
        (f"target.path={small}", "target.path: token ids must be below the model's vocab_size 100, but file_"),
    ):
        assert message in refusal(text_config(override))


def test_conversations_that_cannot_be_trained_on_are_refused(chat_config: ChatConfig, tmp_path: Path) -> None:
    template = "{% if messages[0]['content'].startswith('hello') %}{{ 1 // 0 }}{% endif %}" + GENERATION_TEMPLATE
    failing = make_target(tmp_path / "target", chat_template=template)
    none = "none of 20 has one: 0 windows without a supervised token, 20 refused ("
    for turns, message in (
        (("hello?", "answer {}"), "of 1 different questions or files: 0 windows without a supervised token; add data"),
        (("hello {}?",), f"{none}no assistant turn); correct the data or the template, or let the target answer ("),
        (("hello {}?", ""), f"{none}an answer without text)"),
        (("hello {}?", "yes"), f"with the chat template of {failing} {none}the chat template fails: ZeroDivisionErr"),
    ):
        rows = [chat(f"chat{i}", *(turn.format(i) for turn in turns)) for i in range(20)]
        target = [f"target.path={failing}"] if "ZeroDiv" in message else []
        assert message in refusal(chat_config(rows, *target))


def test_files_without_usable_text_are_counted_by_reason(tmp_path: Path, config_for: ConfigFor) -> None:
    for i in range(40):
        (tmp_path / f"{i}.py").touch()
    (tmp_path / "latin.py").write_bytes(b"# gr\xf6\xdfe\n")
    assert refusal(config_for(f"prompts.paths=[{tmp_path}]")) == (
        f"prompts.paths: must hold at least one file with text that matches '*.py', but {tmp_path} holds none, "
        "40 refused (empty), 1 refused (not UTF-8); correct the paths, prompts.pattern or the data"
    )


def test_answers_too_short_to_draft_are_refused_before_training(chat_config: ChatConfig, tmp_path: Path) -> None:
    template = GENERATION_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    target = f"target.path={make_target(tmp_path / 'target', chat_template=template)}"
    rows = [chat(f"chat{i}", f"hello {i}?", "y") for i in range(20)]
    message = refusal(chat_config(rows, target))
    assert "the train split must hold a document in which two generated tokens follow another token" in message
    report = prepare_prompts(Run(chat_config([*rows, *CHATS], target)))
    assert report.counts["without_drafts"] == 20


def test_refused_and_untrained_answers_inserted_text_and_dates_are_reported(
    chat_config: ChatConfig, tmp_path: Path
) -> None:
    row = chat("mixed", "a?", "SKIP", "b?", "keep")
    row["messages"][1]["weight"] = 0
    odd = [{"messages": [{"role": "narrator", "content": "once"}]}, chat("unanswered", "hello?")]
    config = chat_config([*CHATS, *odd, row])
    report = prepare_prompts(Run(config))
    reasons = {group.reason: group.count for group in report.refused}
    assert (reasons, report.items) == ({"unknown role 'narrator'": 1, "no assistant turn": 1}, 23)
    assert report.refused[0].first[0].endswith("chats.jsonl:21")
    [(whole, supervised)] = read_texts(config)["mixed"]
    assert "SKIP" in whole and supervised == "keep<|end|>"
    assert [report.counts[name] for name in ("answers_untrained", "answers_inserted", "is_dated")] == [1, 0, 0]
    template = GENERATION_TEMPLATE.replace("{% generation %}", "{% generation %}<think></think>")
    target_dir = make_target(tmp_path / "target", chat_template="{{ strftime_now('%Y') }}" + template)
    report = prepare_prompts(Run(chat_config(CHATS, f"target.path={target_dir}")))
    assert [report.counts[name] for name in ("answers_untrained", "answers_inserted", "is_dated")] == [0, 20, 1]
