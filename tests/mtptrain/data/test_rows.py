"""Tests which columns and message keys of a row are read, passed over or refuse it."""

import json
from itertools import product
from typing import Any

import pytest

from mtptrain.config import ConversationSchema
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.rows import EXAMPLE, RowFormat, parse_row

QUESTION, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
PARSED = [QUESTION, ANSWER]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
SYSTEM = {"role": "system", "content": "Be brief."}
PART = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


def row(**columns: Any) -> dict[str, Any]:
    return {"messages": PARSED, **columns}


def chat(question: dict[str, Any] | None = None, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a row with further keys in its question or answer."""
    return {"messages": [{**QUESTION, **(question or {})}, {**ANSWER, **(answer or {})}]}


def chat_of(question: str, answer: str) -> list[dict[str, Any]]:
    return [{**QUESTION, "content": question}, {**ANSWER, "content": answer}]


def refusal(odd: dict[str, Any], form: RowFormat | None = None) -> str:
    with pytest.raises(ConversationRefused) as refused:
        parse_row(odd, form or RowFormat())
    return str(refused.value)


def test_reasoning_in_its_own_key_is_kept_under_the_name_that_templates_read() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        messages = [{**QUESTION, key: None}, {**ANSWER, key: "it is"}, QUESTION, {**ANSWER, key: ""}]
        answer = {**ANSWER, "reasoning_content": "it is"}
        assert parse_row({"messages": messages})[0] == [QUESTION, answer, QUESTION, ANSWER]


def test_what_is_empty_or_not_read_changes_nothing() -> None:
    for odd, passed_over in (
        (row(id=3, source="x", num_turns=2, Model="m", conversation_id="z"), {"source", "num_turns", "Model"}),
        (row(custom=None, tools="[]", functions=[], images="[]", audio="null", system_prompt=" "), set()),
        (row(prompt="hi", chosen=PARSED, num_tools=2, has_image=False), {"prompt", "chosen", "num_tools", "has_image"}),
        (row(weight=1, train=True, loss=1.0, skip_prompt_formatting=True), {"skip_prompt_formatting"}),
        (row(instructions="x", meta={"train": False}), {"instructions", "meta"}),
        (chat({"id": "m0", "weight": 0}, {"weight": 1.0, "tool_calls": None, "toxic": False}), {"id", "toxic"}),
        (chat({"content": [{**PART, "image_url": None, "cache_control": {"type": "x"}}]}), set()),
        ({"conversations": json.dumps(PARSED)}, set()),
        ({"messages": PARSED, "conversations": SHAREGPT, "conversation": None}, set()),
        ({"messages": [{**message, "from": None, "value": None} for message in PARSED]}, set()),
        ({"messages": [QUESTION, SHAREGPT[1]]}, set()),
    ):
        assert parse_row(odd) == (PARSED, passed_over)


def test_every_schema_and_the_names_of_roles_that_the_settings_give_are_read() -> None:
    own = [{"role": "client", "content": "hi"}, {"role": "bot", "content": "yes"}]
    roles = RowFormat(roles={"bot": "assistant", "client": "user"})
    mixed = [{"from": "client", "value": "hi"}, SHAREGPT[1]]
    for odd in (row(), {"messages": own}, {"conversation": own}, {"conversations": mixed}):
        assert parse_row(odd, roles)[0] == PARSED
    assert refusal({"messages": own}) == "unknown role 'client'"
    other_keys = refusal({"conversations": SHAREGPT}, RowFormat(ConversationSchema.messages))
    assert other_keys == "messages must have keys role, content, but one has keys from, value"


def test_an_answer_that_is_not_to_be_trained_is_marked() -> None:
    for flag, value in product(("weight", "train", "training", "trainable", "loss", "loss_weight"), (0, 0.0, False)):
        assert parse_row(chat({flag: value}, {flag: value}))[0] == [QUESTION, {**ANSWER, "weight": "0"}]
        assert refusal(row(**{flag: value})) == "a row that is not to be trained"
        assert parse_row(chat(None, {flag: 1}))[0] == PARSED


def test_a_system_prompt_in_a_column_becomes_the_first_message() -> None:
    for column, role in product(("system", "system_prompt", "system_message"), ("system", "developer")):
        assert parse_row(row(**{column: "Be brief."}))[0] == [SYSTEM, *PARSED]
        inside = [{**SYSTEM, "role": role}, *PARSED]
        assert parse_row({"messages": inside, column: "Be brief.\n"})[0] == inside
        differs = {"messages": inside, column: "Be long."}
        assert refusal(differs) == "a system prompt in a column that differs from that of the messages"


def test_a_question_and_its_answer_in_two_columns_are_read_with_only_the_answer_trained() -> None:
    """The forms are those of TRL, Alpaca, OpenOrca, Nemotron, UltraFeedback and their like."""
    more, old = chat_of("Sure?", "Yes."), {**ANSWER, "weight": "0"}
    unread = {"rejected": PARSED, "score": 9, "text": "### hi"}
    read: list[tuple[dict[str, Any], list[Any]]] = [
        ({"prompt": "hi", "completion": "yes"}, PARSED),
        ({"messages": None, "prompt": [QUESTION], "completion": [ANSWER]}, PARSED),
        ({"prompt": [SYSTEM, QUESTION], "completion": "yes"}, [SYSTEM, *PARSED]),
        ({"prompt": json.dumps(SHAREGPT[:1]), "completion": '[{"city": "Rome"}]'}, chat_of("hi", '[{"city": "Rome"}]')),
        ({"prompt": "hi", "completion": [SHAREGPT[1], *more]}, [*PARSED, *more]),
        ({"prompt": [*PARSED, QUESTION], "completion": [ANSWER]}, [QUESTION, old, *PARSED]),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [QUESTION]}, PARSED),
        ({"prompt": "hi", "chosen": PARSED, **unread}, PARSED),
        ({"prompt": "hi \n", "chosen": PARSED}, [{**QUESTION, "content": "hi \n"}, ANSWER]),
        ({"prompt": "hi", "chosen": [SYSTEM, {**QUESTION, "id": "7"}, ANSWER]}, [SYSTEM, *PARSED]),
        ({"chosen": PARSED, **unread}, PARSED),
        ({"instruction": "hi", "input": "", "output": "yes"}, PARSED),
        ({"instruction": "add", "input": "[]", "output": "null"}, chat_of("add\n[]", "null")),
        ({"instruction": "hi", "context": "it is", "response": "yes"}, chat_of("hi\nit is", "yes")),
        ({"system_prompt": "Be brief.", "question": "hi", "response": "yes"}, [SYSTEM, *PARSED]),
        ({"input": [QUESTION], "output": "yes"}, PARSED),
    ]
    for odd, messages in read:
        assert parse_row(odd) == (messages, odd.keys() & unread.keys())
    refused: list[tuple[dict[str, Any], str]] = [
        ({"text": "hi yes"}, "no messages (messages, conversations, conversation), and no question (prompt, "),
        ({"prompt": "hi", "completion": " "}, f"but prompt with a value; write {EXAMPLE}"),
        ({"chosen": "Human: hi", "rejected": "x"}, "but chosen, rejected with a value; write"),
        ({"problem": "hi", "solution": "yes", "answer": "y"}, "answer and solution, of which one is read (add"),
        ({"instruction": "hi", "history": [["a", "b"]], "output": "yes"}, "instruction and history, of which one is"),
        ({"prompt": PARSED, "completion": "yes"}, "completion must begin with an answer to prompt, which ends before"),
        ({"prompt": "ho", "chosen": PARSED}, "chosen must begin with an answer to prompt, which ends before it"),
        ({"prompt": [QUESTION], "input": "x", "output": "yes"}, "prompt must be text, but is list"),
        ({"prompt": {"role": "user"}, "completion": "yes"}, "column prompt must be a list of messages, but is dict"),
        ({"prompt": "hi", "completion": "yes", "label": True}, "column label, which may change what is trained"),
    ]
    for odd, reason in refused:
        assert reason in refusal(odd)


def test_messages_that_cannot_be_read_refuse_the_row_with_the_reason() -> None:
    keys = "messages must have keys role, content or from, value, but one"
    cases: dict[str, list[dict[str, Any]]] = {
        "no messages": [{"messages": []}, {"messages": None}, {"messages": "[ ]"}],
        "column messages in text that is not JSON": [{"messages": "hi"}],
        "column messages must be a list of messages, but is dict": [{"messages": {"role": "user"}}],
        "unknown role ['user']": [{"messages": [{"role": ["user"], "content": "hi"}]}],
        "text that is not valid Unicode": [chat({"content": "bad \ud83d"}), chat(None, {"thinking": "\ud83d"})],
        "content must be text, but is NoneType": [chat({"content": None})],
        "content in parts (text, text), of which a single part of text is read": [chat({"content": [PART] * 2})],
        "content in parts (text with cache), of which a single part of text is read": [
            chat({"content": [{**PART, "cache": 1}]})
        ],
        "content in parts (image_url with image_url, str), of which a single part of text is read": [
            chat({"content": [IMAGE, "hi"]})
        ],
        f"{keys} has keys content": [{"messages": [QUESTION, {"role": None, "content": "yes"}]}],
        f"{keys} has keys role": [{"messages": [QUESTION, {"role": "assistant"}]}],
        f"{keys} is str": [{"messages": [QUESTION, "yes"]}],
        "system must be text, but is int": [row(system=7)],
        "different messages in two columns": [{"messages": PARSED, "conversation": [QUESTION]}],
        "different reasoning in reasoning_content, reasoning, thinking or the content": [
            chat(None, {"reasoning": "a", "thinking": "b"}),
            chat(None, {"reasoning": "a", "content": "<think>a</think>yes"}),
        ],
        "a user message that calls tools, has reasoning or is to be trained": [
            chat({"reasoning": "a"}),
            chat({"train": True}),
        ],
        "weight must be 0, 1, true or false, but is '0'": [row(weight="0")],
        "weight must be 0, 1, true or false, but is 0.5": [chat(None, {"weight": 0.5}), row(weight=0.5)],
    }
    wrong = {str(odd): refusal(odd) for reason, rows in cases.items() for odd in rows if refusal(odd) != reason}
    assert wrong == {}


def test_a_name_that_says_what_is_trained_or_holds_tools_or_media_refuses_the_row_unless_it_is_metadata() -> None:
    for name in (
        *("keep", "num_skip", "used_in_training", "assistant_masks", "labels", "ignoreIndex", "input_ids"),
        *("chat_template_kwargs", "enable_thinking", "tool_choice", "available_functions"),
        *("image", "videos", "audio_url", "userImage_url", "attachment_name", "systemPrompt"),
    ):
        reason = f"{name}, which may change what is trained, or hold tools, a system prompt or media (add {name} "
        assert refusal(row(**{name: ["x"]})).startswith(f"column {reason}")
        assert refusal(chat(None, {name: ["x"]})).startswith(f"message key {reason}")
        assert parse_row(row(**{name: ["x"]}), RowFormat(metadata=[name])) == (PARSED, set())
