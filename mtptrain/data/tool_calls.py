"""Reads the tools of a conversation, its tool calls and their results into the form that chat templates read.

This is OpenAI's: a list of tools, `tool_calls` in an answer, whose arguments are an object, and messages of role
`tool`. It is read from OpenAI's rows, from ShareGPT's (`function_call`, `observation`) and from Hermes', which write
calls and results between tags in the text.
"""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import unique_keys

CALL_KEYS = ("tool_calls", "function_call")
"""Keys of an answer that hold its calls: a list, or a single call of OpenAI's older form."""
TOOL_COLUMNS = ("tools", "functions")
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
"""What vLLM 0.32 passes on of a tool, in this order; llama.cpp b11434 leaves out the last."""
UNEVEN_TOOLS = (
    "prompts: tools should have a description and parameters, and no `strict`, but some do not: of these, vLLM writes "
    'null for what is left out, and llama.cpp "" and {} and no `strict`, unlike the documents; complete the tools'
)
LONG_FRACTIONS = (
    "prompts: numbers of tools and calls should be whole or have at most six digits, but some do not: in the JSON of a "
    "chat template llama.cpp writes six digits of a fraction, and 1 for 1.0, unlike the documents, vLLM and SGLang"
)
TOOL_NOTES = {UNEVEN_TOOLS, LONG_FRACTIONS}
CALL_IN_TEXT = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT_IN_TEXT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
HERMES_SYSTEM = re.compile(
    r"\s*You are a function calling AI model\b.*<tools>\s*(.*?)\s*</tools>(?:.*</tool_call>)?\s*(.*)", re.DOTALL
)
"""The system prompt of Hermes' data, which describes the tools as the chat template does, and what follows it."""


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Returns tools as `{"type": "function", "function": {"name": ...}}`, or raises ConversationRefused.

    The value is a tool or a list of them. The list, a tool and its parameters may each be JSON text.
    """
    tools = []
    for each in _listed(value, "tools"):
        tool = parsed_json(each, "a tool")
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not _has_name(function) or tool.get("type", "function") != "function":
            raise ConversationRefused("a tool that is not a function with a name")
        read = {key: function[key] for key in FUNCTION_KEYS if key in function}
        if "parameters" in read:
            read["parameters"] = parsed_json(read["parameters"], "the parameters of a tool")
        tools.append({"type": "function", "function": read})
    _refuse_non_json(tools)
    return tools


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Returns calls as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, with their `id` if any.

    The value is a call or a list of them, as an object or as its JSON text. Raises ConversationRefused if it is
    something else, or has a key that is not read.
    """
    calls = []
    for call in _listed(value, "a tool call"):
        outer = {key: each for key, each in call.items() if each is not None} if isinstance(call, Mapping) else {}
        function = outer.pop("function", None) or {
            key: outer.pop(key) for key in ("name", "arguments", "parameters") if key in outer
        }
        outer.pop("index", None)
        if not _has_name(function) or outer.setdefault("type", "function") != "function":
            raise ConversationRefused("a tool call that is not a function with a name")
        items = {**outer, **function}.items()
        given = {key: each for key, each in items if key not in ("id", "type", "name") and each is not None}
        if len(given) > 1 or not given.keys() <= {"arguments", "parameters"}:
            raise ConversationRefused(f"a tool call with {' and '.join(given)}, of which only arguments are read")
        [arguments] = given.values() or [""]
        arguments = {} if arguments == "" else parsed_json(arguments, "the arguments of a tool call")
        if not isinstance(arguments, Mapping):
            raise ConversationRefused("arguments of a tool call that are not an object")
        calls.append({**outer, "function": {"name": function["name"], "arguments": dict(arguments)}})
    if not calls:
        raise ConversationRefused("an answer with an empty list of tool calls")
    _refuse_non_json(calls)
    return calls


def read_hermes(messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[Message], list[dict[str, Any]]]:
    """Returns the messages with the calls and results that their texts hold between tags, and the tools.

    The system prompt of Hermes' data is left out, because the chat template describes the tools in its own words.
    Tools are read from it if the row's columns have none. Raises ConversationRefused if anything would be lost.
    """
    preambles = [HERMES_SYSTEM.fullmatch(message["content"]) for message in messages if message["role"] == "system"]
    if any(preamble[2] for preamble in preambles if preamble):
        raise ConversationRefused("text after Hermes' system prompt, which would be left out with it")
    tools = tools or [tool for preamble in preambles if preamble for tool in _tools_in_text(preamble[1])]
    if not tools:
        return messages, []
    read: list[Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "system" and "<tools>" in content:
            if HERMES_SYSTEM.fullmatch(content) is None:
                raise ConversationRefused("a system prompt with <tools>, which the chat template writes itself")
        elif message["role"] == "assistant" and "<tool_call>" in content and "tool_calls" not in message:
            text, _, rest = content.partition("<tool_call>")
            if CALL_IN_TEXT.sub("", "<tool_call>" + rest).strip():
                raise ConversationRefused("an answer with text after a tool call, or a call that is not closed")
            calls = [call for found in CALL_IN_TEXT.findall(content) for call in read_calls(found)]
            read.append({**message, "content": text.strip(), "tool_calls": calls})
        elif message["role"] == "tool" and "<tool_response>" in content:
            is_all = not RESULT_IN_TEXT.sub("", content).strip()
            results = RESULT_IN_TEXT.findall(content) if is_all else [content]
            read += [{**message, "content": result} for result in results]
        else:
            read.append(message)
    return read, tools


def has_long_fractions(value: Any) -> bool:
    """Returns whether llama.cpp b11434 writes a number of a value of JSON otherwise than Python."""
    if isinstance(value, float):
        return f"{value:g}" != json.dumps(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(has_long_fractions, parts))


def _refuse_non_json(value: Any, name: str = "a tool or call") -> None:
    """Refuse values that only parquet has, such as dates, and NaN, infinity and lone surrogates."""
    if isinstance(value, Mapping | list):
        named = value.items() if isinstance(value, Mapping) else ((name, each) for each in value)
        for key, each in named:
            _refuse_non_json(each, key)
        return
    try:
        json.dumps([name, value], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        origin = ", as datasets makes of texts that look like dates" if isinstance(error, TypeError) else ""
        raise ConversationRefused(
            f"{name} in a tool or call must be a value of JSON, but is {type(value).__name__}{origin} ({error})"
        ) from None


def _has_name(function: Any) -> TypeGuard[Mapping[str, Any]]:
    name = function.get("name") if isinstance(function, Mapping) else None
    return isinstance(name, str) and name.strip() != ""


def _tools_in_text(text: str) -> list[dict[str, Any]]:
    """Returns the tools in a system prompt: one JSON list, or an object in each line."""
    with suppress(ConversationRefused):
        return read_tools(text)
    return [tool for line in text.splitlines() if line.strip() for tool in read_tools(line)]


def _listed(value: Any, name: str) -> list[Any]:
    parsed = parsed_json(value, name)
    return parsed if isinstance(parsed, list) else [parsed]


def parsed_json(value: Any, name: str) -> Any:
    """Returns a value, or what its JSON text holds. Hermes' data also have the text of Python's dicts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except UserError as error:
        raise ConversationRefused(f"{name} in text whose {error}") from None
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(value.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ConversationRefused(f"{name} in text that is not JSON") from None
