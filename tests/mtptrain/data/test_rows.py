import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hydra.core.override_parser.overrides_parser import OverridesParser

from data_prep.conversations import read_conversations
from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.rows import MEDIA, NOT_TRAINED, TOOLS, RowFormat, parse_row

QUESTION, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
PARSED = [QUESTION, ANSWER]
SYSTEM = {"role": "system", "content": "Be brief."}
PART = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


def row(**columns: Any) -> dict[str, Any]:
    return {"messages": PARSED, **columns}


FINISH_COLUMN = "column finish_reason, which is not read (prompts.metadata=[finish_reason] passes it over)"
PASS_METADATA = "(prompts.metadata=[metadata] passes it over)"
IT = ("it over", "them over")


def chat(question: dict[str, Any] | None = None, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a row with further keys in its question or answer."""
    return {"messages": [{**QUESTION, **(question or {})}, {**ANSWER, **(answer or {})}]}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_its_own_key_is_kept_under_the_name_that_templates_read(key: str) -> None:
    messages = [{**QUESTION, key: None}, {**ANSWER, key: "it is"}, QUESTION, {**ANSWER, key: ""}]
    assert parse_row({"messages": messages}) == [QUESTION, {**ANSWER, "reasoning_content": "it is"}, QUESTION, ANSWER]


def test_sharegpt_names_become_roles() -> None:
    names = ("system", "human", "gpt", "tool", "user", "chatgpt", "observation", "assistant", "developer")
    parsed = parse_row({"conversations": [{"from": name, "value": name} for name in names]})
    assert [message["role"] for message in parsed] == [
        *("system", "user", "assistant", "tool", "user", "assistant", "tool", "assistant", "developer")
    ]


@pytest.mark.parametrize(
    "odd",
    [
        row(id=3, source="x", category="y", num_turns=2, quality_score=0.5, conversation_hash="z", _id="i", Model="m"),
        row(custom=None, tools="[]", functions=[], images=[], system="", system_prompt=" ", extra={}),
        row(prompt="hi", chosen=PARSED, instruction=" hi\n", response="yes"),
        row(weight=1, train=True, loss=1.0, split="train"),
        row(finish_reason="stop", stop_reason="tool_use", meta={"finish_reason": "tool_calls"}),
        chat(None, {"finish_reason": "function_call"}),
        chat({"id": "m0", "timestamp": 12, "weight": 0}, {"weight": 1.0, "tool_calls": None, "toxic": False}),
        chat({"name": None}, {"prefix": False, "finish_reason": "stop", "audio": None, "refusal": None}),
        chat({"content": [PART]}, {"content": [{"type": "text", "text": "yes"}]}),
        {"conversations": json.dumps(PARSED)},
        {"messages": None, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"messages": PARSED, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"messages": [{**message, "from": None, "value": None} for message in PARSED]},
        chat({"content": "hi"}, {"content": "yes"}),
    ],
)
def test_what_only_describes_a_row_or_is_empty_or_a_copy_changes_nothing(odd: dict[str, Any]) -> None:
    assert parse_row(odd) == PARSED


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trainable", "loss", "loss_weight"])
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_an_answer_that_is_not_to_be_trained_is_marked(flag: str, value: float) -> None:
    assert parse_row(chat({flag: value}, {flag: value})) == [QUESTION, {**ANSWER, **NOT_TRAINED}]
    assert parse_row(chat(None, {flag: 1})) == PARSED
    with pytest.raises(ConversationRefused, match="a row that is not to be trained"):
        parse_row(row(**{flag: value}))


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_a_system_prompt_in_a_column_becomes_the_first_message(column: str) -> None:
    assert parse_row(row(**{column: "Be brief."})) == [SYSTEM, *PARSED]
    for role in ("system", "developer"):
        inside = [{**SYSTEM, "role": role}, *PARSED]
        assert parse_row({"messages": inside, column: "Be brief.\n"}) == inside
    with pytest.raises(ConversationRefused, match="a system prompt in a column that differs from that of the messages"):
        parse_row({"messages": [SYSTEM, *PARSED], column: "Be long."})


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "narrator", "content": "hi"}]}, "unknown role 'narrator'"),
        ({"conversations": [{"from": "bing", "value": "hi"}]}, "unknown role 'bing'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role ['user']"),
        (chat({"content": "bad \ud83d"}), "text that is not valid Unicode"),
        (chat(None, {"thinking": "\ud83d"}), "text that is not valid Unicode"),
        (chat({"content": None}), "content must be text, but is null"),
        (chat({"content": {"text": "hi"}}), "content must be text, but is an object"),
        (chat({"content": 7}), "content must be text, but is a number"),
        *(
            (chat({"content": parts}), "content in parts, of which only a single part of text is read")
            for parts in ([PART, PART], ["hi"], [{**PART, "cache": 1}], [{**PART, "type": ["text"]}])
        ),
        ({"messages": [QUESTION, {"from": "gpt", "value": "yes"}]}, "messages of different schemas"),
        *(
            ({"messages": [QUESTION, bad]}, "a message without role or content")
            for bad in ({"role": "assistant"}, {"role": None, "content": "yes"}, {**ANSWER, "role": None}, "yes", {})
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"}]},
            "a message without from or value",
        ),
        (
            {"messages": [{"role": None, "content": "hi"}, ANSWER]},
            "unknown schema: messages must have keys role, content or from, value, but have keys content",
        ),
        ({"messages": PARSED, "conversation": [QUESTION]}, "different messages in two columns"),
        (chat(None, {"reasoning": ["it is"]}), "reasoning must be text, but is a list"),
        (
            chat(None, {"reasoning": "a", "thinking": "b"}),
            "different reasoning in reasoning_content, reasoning, thinking",
        ),
        (
            chat(None, {"reasoning": "a", "content": "<think>a</think>yes"}),
            "reasoning both in its own key and in the content",
        ),
        (chat({"reasoning": "a"}), "reasoning of a message that is not an answer"),
        (chat(None, {"weight": 0.5}), "weight must be 0, 1, true or false, but is 0.5"),
        (chat(None, {"train": "false"}), "train must be 0, 1, true or false, but is text"),
        (row(loss=0.7), "loss must be 0, 1, true or false, but is 0.7"),
        (chat({"train": True}), "a user message that is to be trained, but only answers are"),
        (row(system=7), "system must be text, but is a number"),
        (row(tool_choice=[{"name": "search"}]), TOOLS),
        *((row(**{name: ["x.png"]}), MEDIA) for name in ("image", "images", "videos", "audio_url")),
        (chat({"images": ["x.png"]}), MEDIA),
        (chat(None, {"audio": {"id": "x"}}), MEDIA),
        (chat({"content": [IMAGE, PART]}), MEDIA),
        *((chat({"content": f"{place}\nWhat is this?"}), MEDIA) for place in ("<image>", "<speech>", "<|image_pad|>")),
        *((chat({"content": f"Where is it? {place}"}), MEDIA) for place in ("<bbox>", "<|box_start|>", "<audio>")),
        *((chat({"content": f"See {place}"}), MEDIA) for place in ("<img>a.jpg</img>", "<image 1>", "data:image/png")),
        (row(system="<image>\nDescribe it."), MEDIA),
        (row(response="no"), "column response, which is not read (prompts.metadata=[response] passes it over)"),
        (row(a=1, id=2, b=3), "columns a, b, which are not read (prompts.metadata=[a,b] passes them over)"),
        *((row(metadata=it), f"{name} inside column metadata, which is not read {PASS_METADATA}") for name, it in (
            ("train", {"train": False}), ("train", '{"train": false}'), ("train", {"sft": {"train": False}}),
            ("weight", [{"weight": 0}]), ("train", [[{"train": 0}]]), ("train", '[[{"train": 0}]]'),
            ("system_prompt", {"system_prompt": "Talk like a pirate."}),
            ("finish_reason", {"finish_reason": "length"}),
        )),
        (
            row(source=[{"role": "system", "content": "Talk like a pirate."}]),
            "messages inside column source, which are not read (prompts.metadata=[source] passes them over)",
        ),
        *(
            (row(metadata=hidden), f"messages inside column metadata, which are not read {PASS_METADATA.replace(*IT)}")
            for hidden in ([PARSED], [json.dumps(QUESTION)])
        ),
        (row(num_skip=1), "column num_skip, which is not read (prompts.metadata=[num_skip] passes it over)"),
        (
            chat(None, {"meta": {"weight": 0}}),
            "weight inside message key meta, which is not read (prompts.metadata=[meta] passes it over)",
        ),
        *((row(metadata=hidden), TOOLS) for hidden in (
            {"tools": ["x"]}, '{"tools": [{"name": "f"}]}', [[{"tools": ["x"]}]], ['{"tools": [{"name": "f"}]}'],
        )),
        *((row(**{name: ["x"]}), TOOLS) for name in ("Tool_ids", "available_functions")),
        *((row(**{name: "x"}), MEDIA) for name in ("img_url", "user_image_url", "Image_URL", "attachment_name")),
        (row(type="function_calling"), TOOLS),
        (chat(None, {"type": "function_call"}), TOOLS),
        *(
            (row(**{name: value}), f"column {name}, which is not read (prompts.metadata=[{name}] passes it over)")
            for name, value in {"used_in_training": False, "input_ids": [1], "label_ids": [2], "page_name": "a"}.items()
        ),
        (
            chat(None, {"type": "thinking"}),
            "message key type, which is not read (prompts.metadata=[type] passes it over)",
        ),
        (row(finish_reason="length"), FINISH_COLUMN),
        (row(split="test"), "column split, which is not read (prompts.metadata=[split] passes it over)"),
        (row(keep=False), "column keep, which is not read (prompts.metadata=[keep] passes it over)"),
        (chat({"name": "ann"}), "message key name, which is not read (prompts.metadata=[name] passes it over)"),
        *(
            (
                chat(None, {key: value}),
                f"message key {key}, which is not read (prompts.metadata=[{key}] passes it over)",
            )
            for key, value in {
                "refusal": "No.", "prefix": True, "finish_reason": "length", "train_detail": "x",
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_honoured_is_refused_with_the_reason(odd: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationRefused) as refused:
        parse_row(odd)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        (row(response="no"), "response"),
        (row(metadata={"train": False}), "metadata"),
        (row(source=[SYSTEM]), "source"),
        (chat(None, {"prefix": True}), "prefix"),
        (chat(None, {"meta": {"weight": 0}}), "meta"),
    ],
)
def test_the_advice_keeps_the_names_that_are_passed_over_already(odd: dict[str, Any], name: str) -> None:
    with pytest.raises(ConversationRefused) as refused:
        parse_row({**odd, "note": "x"}, RowFormat(metadata=["note"]))
    assert f"(prompts.metadata=[note,{name}] passes " in str(refused.value)


NAMES = [
    "my column",
    "a,b",
    "it's",
    'say "x"',
    "ends in \\",
    "größe",
    "null",
    "True",
    "1",
    "1e3",
    "a.b-c",
    "[a]",
    "$HOME",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_advice_can_be_typed_for_every_name(name: str) -> None:
    with pytest.raises(ConversationRefused) as refused:
        parse_row(row(**{name: 1}), RowFormat(metadata=["note"]))
    advice = str(refused.value).partition(" (")[2].removesuffix(" passes it over)")
    (argument,) = shlex.split(advice)
    assert OverridesParser.create().parse_override(argument).value() == ["note", name]


def test_what_only_describes_a_row_is_passed_over() -> None:
    part = [{"type": "text", "text": "Is 7 odd?", "image_url": None, "cache_control": {"type": "ephemeral"}}]
    described = {"score_chosen": 7.0, "num_tools": 0, "type": "math", "metadata": {"source": "x", "image": None}}
    messages = parse_row({**chat({"content": part}, {"type": "text", "usage": {"tokens": 3}}), **described})
    assert [message["content"] for message in messages] == ["Is 7 odd?", ANSWER["content"]]


def test_answers_may_hold_the_names_of_media_tags() -> None:
    about = {"content": "<image> stands for an image, <|image_pad|> too"}
    assert parse_row(chat({"content": "How do I close a <video> tag?"}, about))[1]["content"] == about["content"]


def test_the_user_may_pass_over_columns_and_keys(tmp_path: Path) -> None:
    odd = {**chat({"name": "ann"}, {"weight": 0}), "response": "no"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(odd))
    found = read_conversations([f"{tmp_path}/chats.jsonl"], RowFormat(metadata=["name", "response", "weight"]))
    assert found.messages(0) == PARSED


def test_keys_that_parquet_adds_to_every_message_are_empty(tmp_path: Path) -> None:
    rows = [chat(None, {"weight": 0, "tool_calls": None}), {**chat({"name": "ann"}), "system": "Be brief."}, chat()]
    Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    found = read_conversations([f"{tmp_path}/chats.parquet"])
    assert [found.messages(i) for i in range(2)] == [[QUESTION, {**ANSWER, **NOT_TRAINED}], PARSED]
    assert len(found.refused) == 1
