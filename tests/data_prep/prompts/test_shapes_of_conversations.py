"""Tests that files with mixed schemas, other names of roles, and unusual first and last turns are read as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import prepare_responses
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from tests.conftest import GENERATION_TEMPLATE, make_target
from tests.data_prep.hidden_states.stage import ONE_RANK
from tests.data_prep.prompts.documents import ConfigFor, read_output
from tests.data_prep.responses.conftest import answered
from tests.data_prep.speaking import fake_server, make_speaking_target

USER_FIRST = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user must begin') }}{% endif %}"
    + GENERATION_TEMPLATE
)


def said(*turns: tuple[str, str], keys: tuple[str, str] = ("role", "content")) -> list[dict[str, str]]:
    return [dict(zip(keys, turn, strict=True)) for turn in turns]


def supervised_texts(config: PipelineConfig, target: Path) -> dict[str, str]:
    """Returns the supervised text of each conversation by its id, after its whole text and a `|`."""
    tokenizer, texts = load_tokenizer(target), {}
    for name, [(_, tokens, mask)] in read_output(config).items():
        supervised = [token for token, is_set in zip(tokens, mask, strict=True) if is_set]
        texts[name] = f"{tokenizer.decode(tokens)}|{tokenizer.decode(supervised)}"
    return texts


def test_one_file_may_mix_schemas_and_names_of_roles(chat_config: ConfigFor, tiny_target: Path) -> None:
    shapes: list[Callable[[int], dict[str, Any]]] = [
        lambda i: {"messages": said(("user", f"q {i}"), ("assistant", f"a {i}"))},
        lambda i: {"conversations": said(("human", f"q {i}"), ("gpt", f"a {i}"), keys=("from", "value"))},
        lambda i: {"conversation": said(("client", f"q {i}"), ("bot", f"a {i}"))},
        lambda i: {"conversations": json.dumps(said(("client", f"q {i}"), ("bot", f"a {i}"), keys=("from", "value")))},
    ]
    rows = [{"id": f"c{i}", **shapes[i % 4](i)} for i in range(20)]
    config = chat_config(rows, "+prompts.roles={bot: assistant, client: user}")
    assert prepare_prompts(Run(config)).refused == []
    assert supervised_texts(config, tiny_target) == {
        f"c{i}": f"<user>q {i}<|end|><assistant>a {i}<|end|>|a {i}<|end|>" for i in range(20)
    }
    config = chat_config(rows)
    report = prepare_prompts(Run(config))
    assert [(group.reason, group.count) for group in report.refused] == [("unknown role 'client'", 10)]


def test_a_question_without_an_answer_ends_a_conversation_and_gets_one_from_the_target(
    chat_config: ConfigFor, tmp_path: Path
) -> None:
    target = make_speaking_target(tmp_path / "target")
    turns = ("user", "one?"), ("assistant", "one"), ("user", "two?")
    rows = [{"id": f"c{i}", "messages": [*said(("system", f"Be {i}.")), *said(*turns)]} for i in range(12)]
    config = chat_config(rows, f"target.path={target}")
    assert prepare_prompts(Run(config)).refused == []
    whole = "<user>one?<|end|><assistant>one<|end|><user>two?<|end|>"
    assert supervised_texts(config, target) == {f"c{i}": f"<system>Be {i}.<|end|>{whole}|one<|end|>" for i in range(12)}
    with fake_server() as server:
        config = chat_config(rows, f"target.path={target}", "prompts.source=responses", f"responses.url={server.url}")
        config.responses.max_new_tokens = 16
        prepare_responses(Run(config), ONE_RANK)
    assert [[m["role"] for m in row["messages"]] for row in answered(config)] == [
        ["system", "user", "assistant", "user", "assistant"]
    ] * 12


@pytest.mark.parametrize("template", [GENERATION_TEMPLATE, USER_FIRST])
def test_a_conversation_that_begins_with_an_answer_is_read_or_refused_as_the_template_says(
    chat_config: ConfigFor, tmp_path: Path, template: str
) -> None:
    target = make_target(tmp_path / "target", chat_template=template)
    turns = [said(("assistant", "hello"), ("user", f"q {i}"), ("assistant", "yes")) for i in range(12)]
    plain = [{"id": f"p{i}", "messages": said(("user", f"p {i}"), ("assistant", "no"))} for i in range(12)]
    rows = [{"id": f"c{i}", "messages": messages} for i, messages in enumerate(turns)]
    config = chat_config([*rows, *plain], f"target.path={target}")
    report = prepare_prompts(Run(config))
    if template is USER_FIRST:
        reason = "the chat template fails: the user must begin"
        assert [(group.reason, group.count) for group in report.refused] == [(reason, 12)]
        assert supervised_texts(config, target).keys() == {f"p{i}" for i in range(12)}
    else:
        texts = supervised_texts(config, target)
        assert report.refused == []
        assert {texts[f"c{i}"].partition("|hello")[2] for i in range(12)} == {"<|end|>yes<|end|>"}
