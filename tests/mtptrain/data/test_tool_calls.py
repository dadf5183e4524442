"""Tests that rows with tools, whatever their schema, become the messages that chat templates read."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data_prep.conversations import read_conversations
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.rows import parse_row
from mtptrain.data.tool_calls import LONG_FRACTIONS, UNEVEN_TOOLS

FUNCTION = {"name": "weather", "description": "Returns the weather.", "parameters": {"type": "object"}}
TEXT_PARAMETERS = {**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"role": "user", "content": "How is Rome?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sky": "blue"}'}
SAID = {"role": "assistant", "content": "Sunny."}
PARSED = [{**ASKED, "tools": [TOOL]}, CALLING, RESULT, SAID]
TEXT_CALL = json.dumps(CALL["function"])


def openai_row(tools: Any = (TOOL,), **answer: Any) -> dict[str, Any]:
    tools = list(tools) if isinstance(tools, tuple) else tools
    answer = answer or {"content": None, "tool_calls": [CALL]}
    return {"messages": [ASKED, {"role": "assistant", **answer}, RESULT, SAID], "tools": tools}


def calling(**call: Any) -> dict[str, Any]:
    return openai_row(content=None, tool_calls=[call])


def sharegpt_row(call: str, tools: Any, role: str = "function_call", answer: str = "observation") -> dict[str, Any]:
    turns = [("human", ASKED["content"]), (role, call), (answer, RESULT["content"]), ("gpt", SAID["content"])]
    return {"conversations": [{"from": name, "value": value} for name, value in turns], "tools": tools}


def answering(text: str) -> dict[str, Any]:
    return sharegpt_row(text, [TOOL], "gpt")


HERMES = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
)
TAGS = "return a json object within <tool_call> tags:\n<tool_call>\n{'name': <function-name>, ...}\n</tool_call>\n"
TOOLS_BEFORE_CALLS = f"{HERMES}<tools>\n{json.dumps(TOOL)}\n</tools>\nFor each function call {TAGS}"
TOOLS_AFTER_CALLS = f"{HERMES}For each function call {TAGS}\nHere are the tools:\n<tools> {json.dumps(TOOL)} </tools>"
"""Prompts of Hermes' data, and of models that were trained on it."""


def hermes_row(system: str = TOOLS_BEFORE_CALLS, **columns: Any) -> dict[str, Any]:
    call = f"<tool_call>\n{TEXT_CALL}\n</tool_call>\n"
    turns = [
        *(("system", system), ("human", ASKED["content"]), ("gpt", call)),
        *(("tool", f"<tool_response>\n{RESULT['content']}\n</tool_response>\n"), ("gpt", SAID["content"])),
    ]
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **columns}


ARGUMENTS: dict[str, Any] = {"city": "Rome", "days": 2}
TWICE, SURROGATE = '{"a": 1, "a": 2}', r'{"a": "\ud800"}'


SAME_CALLS: list[dict[str, Any]] = [
    openai_row(),
    openai_row(content="", tool_calls=[{"function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}]),
    openai_row(content=None, tool_calls=json.dumps([CALL])),
    calling(**CALL, index=0, id=None),
    openai_row(content=None, function_call={"name": "weather", "arguments": json.dumps(ARGUMENTS)}),
    calling(function={"name": "weather", "arguments": None, "parameters": ARGUMENTS}),
    *map(openai_row, (json.dumps([FUNCTION]), [{"type": "function", **FUNCTION}], [json.dumps(TOOL)])),
    openai_row([{"type": "function", "function": TEXT_PARAMETERS}]),
    {**openai_row(None), "functions": [FUNCTION]},
    sharegpt_row(TEXT_CALL, json.dumps([FUNCTION])),
    sharegpt_row(f"[{TEXT_CALL}]", [TOOL], answer="function_response"),
    sharegpt_row(f"<tool_call>{TEXT_CALL}</tool_call>", [TOOL], "gpt", "tool"),
    answering(f"<tool_call>{CALL['function']}</tool_call>"),
    hermes_row(),
    hermes_row(TOOLS_AFTER_CALLS),
    hermes_row(tools=json.dumps([TOOL])),
    {"messages": PARSED},
]


def test_the_schemas_of_tool_calls_give_the_same_messages() -> None:
    assert [parse_row(row)[0] for row in SAME_CALLS] == [PARSED] * len(SAME_CALLS)


def test_several_calls_and_results_of_one_turn_are_kept_in_order_with_their_ids_and_the_text_before_them() -> None:
    second = {"name": "time", "arguments": {}}
    text = f"Let me see.\n<tool_call>{TEXT_CALL}</tool_call>\n<tool_call>{json.dumps(second)}</tool_call>"
    results = "<tool_response>a</tool_response><tool_response>b</tool_response>"
    parsed, _ = parse_row(hermes_row() | {"conversations": [
        *hermes_row()["conversations"][:2], {"from": "gpt", "value": text}, {"from": "tool", "value": results},
    ]})  # fmt: skip
    assert parsed[1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {"type": "function", "function": second}]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    with_ids = {"messages": [
        ASKED, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "c1"}]},
        {**RESULT, "tool_call_id": "c1", "name": "weather"}, SAID,
    ]}  # fmt: skip
    [_, answer, result, _], _ = parse_row(with_ids)
    assert (answer["tool_calls"][0]["id"], result["tool_call_id"], result["name"]) == ("c1", "c1", "weather")


def test_tools_are_read_as_servers_pass_them_on_and_those_that_servers_complete_in_two_ways_are_named() -> None:
    reordered = {"parameters": FUNCTION["parameters"], "name": "weather", "description": "Returns the weather."}
    messages, passed_over = parse_row(openai_row([{**TOOL, "function": reordered | {"examples": []}, "id": 3}]))
    assert json.dumps(messages[0]["tools"]) == json.dumps([TOOL]) and not passed_over
    for uneven in ({"name": "weather"}, FUNCTION | {"strict": True}):
        messages, passed_over = parse_row(openai_row([{"type": "function", "function": uneven}]))
        assert messages[0]["tools"][0]["function"] == uneven and passed_over == {UNEVEN_TOOLS}


@pytest.mark.parametrize(("number", "is_named"), [(37.774929, True), (1.0, True), (1, False), (37.7749, False)])
@pytest.mark.parametrize("in_tool", [True, False])
def test_a_fraction_that_llama_cpp_rounds_is_named(number: float, is_named: bool, in_tool: bool) -> None:
    tool = {**TOOL, "function": FUNCTION | {"parameters": {"enum": [number]}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"at": [number]}}}
    in_call = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert (LONG_FRACTIONS in parse_row(openai_row([tool]) if in_tool else in_call)[1]) == is_named


def test_text_with_tags_of_a_row_without_tools_and_a_result_not_all_between_tags_stay_as_they_are() -> None:
    text = "Write <tool_call>{}</tool_call> and <tools> around it."
    row = {"messages": [{"role": "system", "content": text}, ASKED, {"role": "assistant", "content": text}]}
    assert parse_row(row)[0] == row["messages"]
    row = openai_row()
    row["messages"][2] = {**RESULT, "content": "see <tool_response>a</tool_response>"}
    assert parse_row(row)[0][2] == row["messages"][2]


CALL_TEXT = f"<tool_call>{TEXT_CALL}</tool_call>"
REFUSED: dict[str, list[dict[str, Any]]] = {
    "a tool call that is not a function with a name": [
        calling(function={"arguments": "{}"}), calling(name="f", type="custom"),
        openai_row(content=None, tool_calls=["weather"]),
    ],
    "a tool call in text that is not JSON": [sharegpt_row("I call it", [TOOL])],
    "the arguments of a tool call in text that is not JSON": [calling(name="f", arguments="{")],
    "the arguments of a tool call in text whose key 'a' occurs twice": [calling(name="f", arguments=TWICE)],
    "arguments of a tool call that are not an object": [calling(name="f", arguments="[1]")],
    "a tool call with retries, of which": [calling(name="f", retries=3)],
    "a tool call with arguments and parameters, of which": [calling(name="f", arguments={"a": 1}, parameters={})],
    "an answer with an empty list of tool calls": [answering("<tool_call>[]</tool_call>")],
    "a in a tool or call must be a value of JSON, but is float (": [calling(name="f", arguments='{"a": NaN}')],
    "a in a tool or call must be a value of JSON, but is str (": [calling(name="f", arguments=SURROGATE)],
    "start in a tool or call must be a value of JSON, but is datetime, as datasets makes of texts that": [
        calling(name="f", arguments={"all": [{"start": datetime(2024, 1, 2)}]})],
    "a tool that is not a function with a name": [openai_row([{**TOOL, "type": "custom"}]), openai_row([{"a": "x"}])],
    "a tool in text that is not JSON": [openai_row(["weather"])],
    "the parameters of a tool in text that is not JSON": [openai_row([{**FUNCTION, "parameters": "none"}])],
    "different tools in two places": [{**openai_row(), "functions": [{"name": "f"}]}],
    "a user message that calls tools, has": [{"messages": [{**ASKED, "tool_calls": [CALL]}, SAID]}],
    "an answer with text after a tool call, or a call that is not closed": [
        answering(f"{CALL_TEXT} Y"), answering(f"<tool_call>{TEXT_CALL}"),
    ],
    "a system prompt with <tools>, which the chat": [{**openai_row(), "system": "Choose one of <tools>.</tools>"}],
    "text after Hermes' system prompt, which": [hermes_row(f"{TOOLS_BEFORE_CALLS}\nBe kind.")],
    "no messages": [{"conversations": hermes_row()["conversations"][:1]}],
}  # fmt: skip


def test_tools_that_cannot_be_read_refuse_the_row_with_the_reason() -> None:
    for reason, rows in REFUSED.items():
        for row in rows:
            with pytest.raises(ConversationRefused) as refused:
                parse_row(row)
            assert str(refused.value).startswith(reason)


def test_nulls_that_parquet_fills_into_tools_and_calls_are_left_out_and_those_of_jsonl_are_kept(tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {
            "messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, SAID],
            "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        }

    rows = [row("weather", {"city": "Rome"}), row("time", {"zone": "CET"})]
    Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    rows.append(row("weather", {"city": None, "days": [1, "two"]}))
    Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "mixed.parquet")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    stored, mixed, written = (
        read_conversations([f"{tmp_path}/{name}"]) for name in ("chats.parquet", "mixed.parquet", "chats.jsonl")
    )
    assert [stored.messages(i) for i in range(2)] == [written.messages(i) for i in range(2)]
    assert [mixed.messages(i) for i in range(3)] == [written.messages(i) for i in range(3)]
    assert written.messages(0)[0]["tools"] == rows[0]["tools"]
    assert written.messages(2)[1]["tool_calls"][0]["function"]["arguments"] == {"city": None, "days": [1, "two"]}
