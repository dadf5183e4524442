"""Reads one row of conversations: its messages, system prompt and tools, in any schema.

Columns and message keys that are not read are passed over, and named in the report. Those whose names say what to
train, or hold tools, a system prompt or media, refuse the row. `prompts.metadata` names those that a user passes over.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtptrain.config import ConversationSchema, PromptsConfig
from mtptrain.data.conversation import SYSTEM_ROLES, ConversationRefused, Message
from mtptrain.data.row_files import Row
from mtptrain.data.tool_calls import (
    CALL_KEYS,
    FUNCTION_KEYS,
    LONG_FRACTIONS,
    TOOL_COLUMNS,
    UNEVEN_TOOLS,
    has_long_fractions,
    parsed_json,
    read_calls,
    read_hermes,
    read_tools,
)
from mtptrain.settings.data import ROLES as KNOWN_ROLES

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
"""Columns whose text becomes the first message."""
QUESTIONS = ("prompt", "instruction", "question", "query", "problem")
"""Columns of the question in rows without messages: a text, or a list of messages."""
CONTEXTS = ("input", "context")
"""Columns whose text continues such a question. Without another question, the `input` is the question."""
UNREAD_CONTEXTS = ("history", "passage", "document", "article")
"""Columns that would belong to such a question, but are not read."""
ANSWERS = ("completion", "chosen", "output", "response", "answer", "solution")
"""Columns of the answer in rows without messages; of a preference set, that which was chosen."""
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
"""A row of which every chat template can make a document."""
MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"\s*:')
"""How the JSON text of a list of messages begins."""
ID_COLUMNS = ("id", "conversation_id")
MESSAGE_KEYS = {ConversationSchema.messages: ("role", "content"), ConversationSchema.sharegpt: ("from", "value")}
ROLES = {
    **{role: role for role in KNOWN_ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function_call": "assistant"},
    **{"observation": "tool", "function_response": "tool", "function": "tool"},
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message that may hold its reasoning separately from its content."""
TEXT_NAMES = {"content", "value", *SYSTEM_COLUMNS, *REASONING_KEYS, *QUESTIONS, *CONTEXTS, *ANSWERS}
"""Columns and message keys whose text is read."""
TRAIN_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
"""Columns and message keys that say whether a row or an answer is to be trained: 1 or true, 0 or false."""
TRAINING_NAMES = re.compile(
    r"\b(train|loss|weight|mask|label|ignore|keep|skip(?! prompt formatting)|(input|token) ids"
    r"|chat template|enable thinking)"
)
"""Beginnings of words in the names of columns and message keys that change what is trained."""
HOLDING_NAMES = re.compile(r"\b(tool|function|system|image|video|audio|img|picture|photo|pixel|attachment)")
"""Beginnings of words in the names of those that hold tools, system prompts or media, unless they are numbers."""


@dataclass(frozen=True)
class RowFormat:
    """How rows are read, as the settings of the same names in `prompts` say."""

    schema: ConversationSchema = ConversationSchema.auto
    metadata: Collection[str] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    drop_failed: bool = False

    @staticmethod
    def of(prompts: PromptsConfig) -> "RowFormat":
        return RowFormat(prompts.schema, prompts.metadata, prompts.roles, prompts.drop_failed)


ANY_SCHEMA = RowFormat()


def parse_row(row: Row, form: RowFormat = ANY_SCHEMA) -> tuple[list[Message], set[str]]:
    """Returns the messages of a row, and the names of what is passed over, with those of `TOOL_NOTES` that hold."""
    columns = given_columns(row, form.metadata)
    lists = [_listed(name, columns.pop(name)) for name in MESSAGE_COLUMNS if name in columns]
    parsed = [[_parse_message(message, form) for message in listed] for listed in lists if listed]
    if not parsed:
        parsed = [_parse_pair(row, columns, form)]
    messages = [message for message, _ in parsed[0]]
    if any([message for message, _ in each] != messages for each in parsed):
        raise ConversationRefused("different messages in two columns")
    system = [text_of(name, columns.pop(name)) for name in SYSTEM_COLUMNS if name in columns]
    tools = [read_tools(columns.pop(name)) for name in TOOL_COLUMNS if name in columns]
    tools += [message.pop("tools") for message in messages[:1] if "tools" in message]
    if any("tools" in message for message in messages):
        raise ConversationRefused("tools in a message after the first")
    if any(each != tools[0] for each in tools):
        raise ConversationRefused("different tools in two places")
    passed_over = (pass_over("column", columns) - {*ID_COLUMNS}).union(*(keys for _, keys in parsed[0]))
    for text in system:
        messages = _with_system(messages, text)
    messages, found = read_hermes(messages, tools[0] if tools else [])
    if any(tuple(each["function"]) != FUNCTION_KEYS[:3] for each in found):
        passed_over = {*passed_over, UNEVEN_TOOLS}
    if has_long_fractions([found, *(message.get("tool_calls") for message in messages)]):
        passed_over = {*passed_over, LONG_FRACTIONS}
    if not messages:
        raise ConversationRefused("no messages")
    if found:
        messages[0] = {**messages[0], "tools": found}
    return messages, passed_over


def _parse_pair(row: Row, columns: dict[str, Any], form: RowFormat) -> list[tuple[Message, set[str]]]:
    """Returns the messages of a row that has a question and its answer in two columns, which it takes from `columns`.

    Each of the two is a text or a list of messages. Answers inside the question are not trained.
    """
    given = ([name for name in names if name in columns] for names in (QUESTIONS, CONTEXTS, ANSWERS, UNREAD_CONTEXTS))
    questions, contexts, answers, unread = given
    if not questions:  # an `input` alone is the question
        questions, contexts = contexts[:1], contexts[1:]
    if not answers and any(name in row for name in MESSAGE_COLUMNS):
        raise ConversationRefused("no messages")
    if not answers or not (questions or isinstance(columns[answers[0]], list)):
        raise ConversationRefused(
            f"no messages ({', '.join(MESSAGE_COLUMNS)}), and no question ({', '.join(QUESTIONS)}) with its answer "
            f"({', '.join(ANSWERS)}), but {', '.join(sorted(columns)) or 'no column'} with a value; write {EXAMPLE}"
        )
    for names in (questions[:1] + unread, questions, answers):
        if len(names) > 1:
            raise ConversationRefused(f"{' and '.join(names)}, of which one is read (add others to prompts.metadata)")
    values = {name: columns.pop(name) for name in (*questions, *contexts, *answers)}
    answer = _turns(answers[0], values[answers[0]], "assistant", form)
    if not questions:
        return answer
    texts = [text_of(name, values[name]) for name in (*questions, *contexts)] if contexts else []
    question = _turns(questions[0], "\n".join(texts) if contexts else values[questions[0]], "user", form)
    # The answers of preference sets may repeat it, with other keys or white space, and after a system prompt.
    system = [each for each in answer[:1] if each[0]["role"] in SYSTEM_ROLES and question[:1] != answer[:1]]
    repeated = answer[len(system) :][: len(question)]
    if [_said(message) for message, _ in repeated] == [_said(message) for message, _ in question]:
        question, answer = system + question, answer[len(system) + len(repeated) :]
    if not question or not answer or question[-1][0]["role"] == "assistant" or answer[0][0]["role"] != "assistant":
        raise ConversationRefused(f"{answers[0]} must begin with an answer to {questions[0]}, which ends before it")
    untrained: list[tuple[Message, set[str]]] = [
        ({**message, "weight": "0"} if message["role"] == "assistant" else message, keys) for message, keys in question
    ]
    return [*untrained, *answer]


def _said(message: Message) -> tuple[str, str]:
    return message["role"], message["content"].strip()


def _turns(column: str, value: Any, role: str, form: RowFormat) -> list[tuple[Message, set[str]]]:
    """Returns the messages of a column that holds a list of them, its JSON text, or the text of one message."""
    if isinstance(value, str) and not MESSAGES_AS_TEXT.match(value):
        return [({"role": role, "content": text_of(column, value)}, set())]
    return [_parse_message(message, form) for message in _listed(column, value)]


def given_columns(row: Row, metadata: Collection[str]) -> dict[str, Any]:
    """Returns the columns or message keys that have a value and are not named in `prompts.metadata`."""
    if not isinstance(row, Mapping):
        raise ConversationRefused(f"a row must be an object, but is {type(row).__name__}")
    return {name: value for name, value in row.items() if name not in metadata and not _is_empty(name, value)}


def pass_over(what: str, items: Row) -> set[str]:
    """Returns the names of those items, each a `column` or `message key`, that nobody reads, or refuses the row."""
    for name, value in items.items():
        words = re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).lower()
        is_number = isinstance(value, int | float)
        if name in TRAIN_FLAGS:
            if not _is_trained(name, value):
                raise ConversationRefused("a row that is not to be trained")
        elif TRAINING_NAMES.search(words) or (HOLDING_NAMES.search(words) and not is_number):
            raise ConversationRefused(
                f"{what} {name}, which may change what is trained, or hold tools, a system prompt or media (add {name} "
                "to prompts.metadata to pass it over)"
            )
    return items.keys() - {*TRAIN_FLAGS}


def _is_empty(name: str, value: Any) -> bool:
    """Returns whether a value is empty, or JSON text of what is, which other columns than those of texts may hold."""
    texts = ("",) if name in {*QUESTIONS, *CONTEXTS, *ANSWERS} else ("", "[]", "{}", "null")
    return value is None or (value.strip() in texts if isinstance(value, str) else value in ([], {}))


def _listed(column: str, value: Any) -> list[Any]:
    """Returns the list of messages in a column, which may be JSON text."""
    value = parsed_json(value, f"column {column}")
    if not isinstance(value, list):
        raise ConversationRefused(f"column {column} must be a list of messages, but is {type(value).__name__}")
    return value


def _parse_message(message: Any, form: RowFormat) -> tuple[Message, set[str]]:
    """Returns a message, and the names of its keys that are passed over."""
    items = given_columns(message, form.metadata) if isinstance(message, Mapping) else {}
    schemas = [keys for schema, keys in MESSAGE_KEYS.items() if form.schema in ("auto", schema)]
    has_call = any(key in items for key in CALL_KEYS)
    found = [keys for keys in schemas if keys[0] in items and (keys[1] in message or has_call)]
    if not found:
        wanted = " or ".join(", ".join(keys) for keys in schemas)
        given = f"has keys {', '.join(sorted(map(str, items)))}" if items else f"is {type(message).__name__}"
        raise ConversationRefused(f"messages must have keys {wanted}, but one {given}")
    role_key, content_key = found[0]
    given_role, content = items.pop(role_key), message.get(content_key)
    items.pop(content_key, None)
    role = (ROLES | {**form.roles}).get(given_role) if isinstance(given_role, str) else None
    if role is None:
        raise ConversationRefused(f"unknown role {given_role!r}")
    calls = [call for key in CALL_KEYS if key in items for call in read_calls(items.pop(key))]
    if given_role == "function_call":
        content, calls = "", [*calls, *read_calls(content)]
    content = "" if calls and content is None else _content(content)
    parsed: Message = {"role": role, "content": content}
    if role == "tool" and "tool_call_id" in items:
        parsed["tool_call_id"] = text_of("tool_call_id", items.pop("tool_call_id"))
    if role == "tool" and "name" in items:
        parsed["name"] = text_of("name", items.pop("name"))
    if "tools" in items:
        parsed["tools"] = read_tools(items.pop("tools"))
    if calls:
        parsed["tool_calls"] = calls
    if reasoning := {text_of(key, items.pop(key)) for key in REASONING_KEYS if key in items}:
        parsed["reasoning_content"] = reasoning.pop()
        if reasoning or "</think>" in content:
            raise ConversationRefused(f"different reasoning in {', '.join(REASONING_KEYS)} or the content")
    flags = {_is_trained(key, items.pop(key)) for key in TRAIN_FLAGS if key in items}
    if role != "assistant" and (calls or "reasoning_content" in parsed or True in flags):
        raise ConversationRefused(f"a {role} message that calls tools, has reasoning or is to be trained")
    if role == "assistant" and False in flags:
        parsed["weight"] = "0"
    return parsed, pass_over("message key", items)


def _content(content: Any) -> str:
    """Returns the text of a message, which may be the only part of a list."""
    if not isinstance(content, list):
        return text_of("content", content)
    # Parquet fills in null for keys that only other parts have; `cache_control` speaks to a server.
    parts = [
        {key: value for key, value in part.items() if value is not None and key != "cache_control"}
        if isinstance(part, Mapping)
        else {"type": type(part).__name__}
        for part in content
    ]
    if len(parts) != 1 or parts[0].keys() != {"type", "text"} or parts[0]["type"] != "text":
        kinds = [" with ".join([str(part.get("type")), *sorted(part.keys() - {"type", "text"})]) for part in parts]
        raise ConversationRefused(f"content in parts ({', '.join(kinds)}), of which a single part of text is read")
    return text_of("content", parts[0]["text"])


def text_of(name: str, value: Any) -> str:
    """Returns a text unchanged. Refuses lone surrogates, which JSON allows but tokenizers reject."""
    if not isinstance(value, str):
        raise ConversationRefused(f"{name} must be text, but is {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConversationRefused("text that is not valid Unicode") from None
    return value


def _is_trained(name: str, value: Any) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ConversationRefused(f"{name} must be 0, 1, true or false, but is {value!r:.40}")
    return bool(value)


def _with_system(messages: list[Message], text: str) -> list[Message]:
    """Returns the messages after a system prompt from a column, which may repeat that of the messages."""
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": text}, *messages]
    if messages[0]["content"].strip() != text.strip():
        raise ConversationRefused("a system prompt in a column that differs from that of the messages")
    return messages
