"""Reads one row of conversations through a whitelist of columns and of message keys.

Everything in a row is honoured, only describes the row (`is_metadata`), or refuses the row with a reason, which the
report counts. A user can pass over further columns and keys by naming them in `prompts.metadata`.
"""

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from mtptrain.config import ConversationSchema, PromptsConfig
from mtptrain.data.questions import SYSTEM_ROLES
from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.tool_calls import CALL_KEYS, RESULT_KEYS, TOOL_COLUMNS, Message, read_calls, read_hermes, read_tools
from mtptrain.settings.data import ROLES as KNOWN_ROLES
from mtptrain.utils.files import unique_keys

Row = Mapping[str, Any]

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
"""Columns whose text becomes the first message."""
MESSAGE_KEYS = {ConversationSchema.messages: ("role", "content"), ConversationSchema.sharegpt: ("from", "value")}
ROLES = {
    ConversationSchema.messages: {role: role for role in KNOWN_ROLES} | {"function": "tool"},
    ConversationSchema.sharegpt: {
        "system": "system",
        "developer": "developer",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "assistant": "assistant",
        "function_call": "assistant",
        "tool": "tool",
        "observation": "tool",
        "function_response": "tool",
    },
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message that may hold its reasoning separately from its content."""
TRAIN_FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
"""Columns and message keys that say whether a row or an answer is to be trained: 1 or true, 0 or false."""
NOT_TRAINED = {"weight": "0"}
"""A parsed message that is not to be trained has this item. A number instead of the text would change the names of
conversations, which are hashes of their messages."""
TOOL_NAMES = ("tool", "function")
"""Beginnings of words in the names of columns and message keys that hold tools or calls."""
MEDIA_NAMES = ("image", "video", "audio", "img", "picture", "photo", "pixel", "attachment")
"""Beginnings of words in the names of columns, message keys and parts of a content."""
FINISH_KEYS = ("finish_reason", "stop_reason")
FINISHED = ("stop", "end_turn", "eos", "eos_token", "tool_calls", "function_call", "tool_use")
"""Values of `finish_reason` and `stop_reason` of an answer that was not cut off."""
METADATA = {
    *("id", "_id", "uid", "uuid", "idx", "index", "row", "hash", "hashed_ip", "subset", "version", "license"),
    *("source", "sources", "dataset", "dataset_name", "origin", "url", "link", "author", "annotator", "created_by"),
    *("category", "categories", "topic", "topics", "tag", "tags", "task", "task_type", "task_category", "type"),
    *("source_url", "page_url", "model_name", "file_name", "task_name", "source_name", "user_name"),
    *("domain", "subject", "title", "intent", "difficulty", "quality", "lang", "language", "languages"),
    *("model", "generator", "teacher", "created", "date", "time", "timestamp", "country", "state", "header"),
    *("turn", "turns", "turn_identifier", "length", "tokens", "usage", "views", "likes", "avatarurl"),
    *("score", "scores", "rating", "toxic", "redacted", "moderation", "openai_moderation", "detoxify_moderation"),
    *("metadata", "meta", "skip_prompt_formatting"),
}
"""Names, in lower case, of columns and message keys that only describe a row."""
METADATA_PATTERN = re.compile(
    r"(num|score)_(?!mask|skip|train|ignore|loss)\w+|__\w+__"
    r"|(?!(input|label|token)_ids)\w+_(id|ids|idx|hash|score|scores|count|at|length|quality)"
)
"""Further names, in lower case, that only describe a row. It leaves out those that may say what is trained."""
_MEDIA = "image|img|video|audio|vision|speech|sound|bbox|frame"
MEDIA_IN_TEXT = re.compile(
    rf"<image>|<bbox>|^\s*<({_MEDIA})>|<({_MEDIA})>\s*$|\[IMG\]|<start_of_image>|<img_context>|<ImageHere>|<image \d+>"
    rf"|<\|?({_MEDIA}|box|quad|object_ref|point)(_\w+)?\|>|<({_MEDIA})_\w+>|<img>[^<]*</img>"
    r"|data:(image|video|audio)/",
    re.IGNORECASE,
)
"""Placeholders of images, audio and video in the text of a prompt."""
PLAIN_NAME = re.compile(r"(?!(null|true|false|nan|inf)$)[a-z_][\w.-]*", re.ASCII | re.IGNORECASE)
"""Names that Hydra and the shell read as they are, without quotes."""
TOOLS, MEDIA = "tools or tool calls in a place that is not read", "images, audio or video, which are not read"


@dataclass(frozen=True)
class RowFormat:
    """How rows are read, as the settings of the same names in `prompts` say."""

    schema: ConversationSchema = ConversationSchema.auto
    metadata: Collection[str] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(prompts: PromptsConfig) -> "RowFormat":
        return RowFormat(prompts.schema, prompts.metadata, prompts.roles)


ANY_SCHEMA = RowFormat()


def refuse_unread_columns(columns: Row, metadata: Collection[str]) -> None:
    """Raises ConversationRefused for a column beside the messages that is neither honoured nor describes its row.

    Args:
        columns: the columns.
        metadata: `prompts.metadata`, which the advice extends.
    """
    unread = [name for name, value in columns.items() if not _is_read_column(name, value, metadata)]
    _refuse_unread("column", unread, metadata)


def parse_row(row: Row, form: RowFormat = ANY_SCHEMA) -> list[Message]:
    """Returns the messages of a row, with `role`, `content` and, if there is reasoning, `reasoning_content`.

    An answer that calls tools has `tool_calls`, and the first message of a row with tools has `tools`: see
    `mtptrain.data.tool_calls`. A message that is not to be trained also has the item of `NOT_TRAINED`.

    Args:
        row: the columns of the row.
        form: how the row is read. Schema `auto` is recognised by the keys of the first message; `metadata` names more
            columns and keys that only describe a row; `roles` adds names of roles.

    Raises:
        ConversationRefused: the row has no messages in a known schema, or something that cannot be honoured.
    """
    if not isinstance(row, Mapping):
        raise ConversationRefused(f"a row must be an object, but is {kind(row)}")
    columns = {name: value for name, value in row.items() if name not in form.metadata and not _is_empty(value)}
    lists = [_listed(name, columns.pop(name)) for name in MESSAGE_COLUMNS if name in columns]
    if not any(lists):
        if any(name in row for name in MESSAGE_COLUMNS):
            raise ConversationRefused("no messages")
        raise ConversationRefused(f"no column {' or '.join(MESSAGE_COLUMNS)}, but {', '.join(sorted(row)) or 'none'}")
    parsed = [_parse_messages(listed, form) for listed in lists if listed]
    if any(messages != parsed[0] for messages in parsed):
        raise ConversationRefused("different messages in two columns")
    messages = parsed[0]
    system = [text_of(name, columns.pop(name)) for name in SYSTEM_COLUMNS if name in columns]
    if any(MEDIA_IN_TEXT.search(text) for text in system):
        raise ConversationRefused(MEDIA)
    tools = [read_tools(columns.pop(name)) for name in TOOL_COLUMNS if name in columns]
    tools += [message.pop("tools") for message in messages[:1] if "tools" in message]
    if any(each != tools[0] for each in tools):
        raise ConversationRefused("different tools in two places")
    if any("tools" in message for message in messages):
        raise ConversationRefused("tools in a message after the first")
    contents = {message["content"].strip() for message in messages}
    # A column may repeat the messages, or the text of one.
    others = {
        name: value
        for name, value in columns.items()
        if value not in lists and not (isinstance(value, str) and value.strip() in contents)
    }
    refuse_unread_columns(others, form.metadata)
    for text in system:
        messages = _with_system(messages, text)
    messages, found = read_hermes(messages, tools[0] if tools else [])
    if not messages:
        raise ConversationRefused("no messages")
    return [{**messages[0], "tools": found}, *messages[1:]] if found else messages


def kind(value: Any) -> str:
    """Returns the words for a value of JSON that should be of another type."""
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        str: "text",
        int: "a number",
        float: "a number",
    }
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def is_metadata(name: str) -> bool:
    """Returns whether a column or message key only describes a row."""
    return name.lower() in METADATA or METADATA_PATTERN.fullmatch(name.lower()) is not None


def _is_empty(value: Any) -> bool:
    empty = ("", "[]", "{}", "null")
    return value is None or (value.strip() in empty if isinstance(value, str) else value in ([], {}))


def _listed(column: str, value: Any) -> list[Any]:
    """Returns the list of messages in a column, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            raise ConversationRefused(f"column {column}: text that is not a JSON list of messages") from None
    if not isinstance(value, list):
        raise ConversationRefused(f"column {column} must be a list of messages, but is {kind(value)}")
    return value


def _parse_messages(listed: list[Any], form: RowFormat) -> list[Message]:
    row_schema = _schema_of(listed[0], form.schema)
    if row_schema is None:
        items = listed[0].items() if isinstance(listed[0], Mapping) else ()
        given = sorted(str(key) for key, value in items if value is not None)
        wanted = " or ".join(", ".join(keys) for name, keys in MESSAGE_KEYS.items() if form.schema in ("auto", name))
        found = f"keys {', '.join(given)}" if given else kind(listed[0])
        raise ConversationRefused(f"unknown schema: messages must have keys {wanted}, but have {found}")
    return [_parse_message(message, replace(form, schema=row_schema)) for message in listed]


def _schema_of(message: Any, schema: ConversationSchema) -> ConversationSchema | None:
    candidates = MESSAGE_KEYS if schema is ConversationSchema.auto else {schema: MESSAGE_KEYS[schema]}
    for name, (role_key, content_key) in candidates.items():
        if not isinstance(message, Mapping) or message.get(role_key) is None:
            continue
        if content_key in message or any(not _is_empty(message.get(key)) for key in CALL_KEYS):
            return name
    return None


def _parse_message(message: Any, form: RowFormat) -> Message:
    role_key, content_key = MESSAGE_KEYS[form.schema]
    if _schema_of(message, form.schema) is None:
        is_other = _schema_of(message, ConversationSchema.auto) is not None
        reason = "messages of different schemas" if is_other else f"a message without {role_key} or {content_key}"
        raise ConversationRefused(reason)
    items = {key: value for key, value in message.items() if key not in form.metadata and not _is_empty(value)}
    given_role, roles = items.pop(role_key, None), {**ROLES[form.schema], **form.roles}
    if not isinstance(given_role, str) or given_role not in roles:
        raise ConversationRefused(f"unknown role {given_role!r}")
    role = roles[given_role]
    is_answer = role == "assistant"
    items.pop(content_key, None)
    content = message.get(content_key)
    calls = [call for key in CALL_KEYS if key in items for call in read_calls(items.pop(key))]
    if given_role == "function_call":
        content, calls = "", [*calls, *read_calls(content)]
    if calls and not is_answer:
        raise ConversationRefused(f"a {role} message that calls a tool, but only answers do")
    kept: Message = {key: text_of(key, items.pop(key)) for key in RESULT_KEYS if role == "tool" and key in items}
    if "tools" in items:
        kept["tools"] = read_tools(items.pop("tools"))
    reasoning = {text_of(key, items.pop(key)) for key in REASONING_KEYS if key in items}
    flags = {_is_trained(key, items.pop(key)) for key in TRAIN_FLAGS if key in items}
    if True in flags and not is_answer:
        raise ConversationRefused(f"a {role} message that is to be trained, but only answers are")
    unread = [key for key, value in items.items() if not _is_read_key(key, value, form.metadata)]
    _refuse_unread("message key", unread, form.metadata)
    content = "" if calls and content is None else _content(content)
    if not is_answer and MEDIA_IN_TEXT.search(content):
        raise ConversationRefused(MEDIA)
    parsed: Message = {"role": role, "content": content, **kept}
    if calls:
        parsed["tool_calls"] = calls
    if reasoning:
        parsed["reasoning_content"] = _only_reasoning(reasoning, content, is_answer)
    return parsed | (NOT_TRAINED if False in flags and is_answer else {})


def _content(content: Any) -> str:
    """Returns the text of a message, which may be the only part of a list."""
    if not isinstance(content, list):
        return text_of("content", content)
    # Parquet fills in null for keys that only other parts have; `cache_control` speaks to a server.
    parts = [
        {key: value for key, value in part.items() if value is not None and key != "cache_control"}
        for part in content
        if isinstance(part, Mapping)
    ]
    types = {str(part.get("type")) for part in parts}
    if any(_has_word(name, MEDIA_NAMES) for name in types):
        raise ConversationRefused(MEDIA)
    if len(content) != 1 or types != {"text"} or set(parts[0]) != {"type", "text"}:
        raise ConversationRefused("content in parts, of which only a single part of text is read")
    return text_of("content", parts[0]["text"])


def text_of(name: str, value: Any) -> str:
    """Returns a text unchanged. Refuses lone surrogates, which JSON allows but tokenizers reject."""
    if not isinstance(value, str):
        raise ConversationRefused(f"{name} must be text, but is {kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConversationRefused("text that is not valid Unicode") from None
    return value


def _only_reasoning(texts: set[str], content: str, is_answer: bool) -> str:
    if not is_answer:
        raise ConversationRefused("reasoning of a message that is not an answer")
    if len(texts) > 1:
        raise ConversationRefused(f"different reasoning in {', '.join(REASONING_KEYS)}")
    if "</think>" in content:
        raise ConversationRefused("reasoning both in its own key and in the content")
    return texts.pop()


def _is_trained(name: str, value: Any) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        shown = value if isinstance(value, int | float) else kind(value)
        raise ConversationRefused(f"{name} must be 0, 1, true or false, but is {shown}")
    return bool(value)


def _is_read_key(key: str, value: Any, metadata: Collection[str]) -> bool:
    """Returns whether a message key is honoured or only describes its message."""
    if (key == "prefix" and value is False) or (key in FINISH_KEYS and value in FINISHED):
        return True
    _refuse_hidden(f"message key {key}", key, key, value, metadata)
    return is_metadata(key) and (key != "type" or value in ("text", "message"))


def _is_read_column(name: str, value: Any, metadata: Collection[str]) -> bool:
    """Returns whether a column is honoured or only describes its row."""
    if name in TRAIN_FLAGS:
        if not _is_trained(name, value):
            raise ConversationRefused("a row that is not to be trained")
        return True
    if name in FINISH_KEYS and value in FINISHED:
        return True
    _refuse_hidden(f"column {name}", name, name, value, metadata)
    return is_metadata(name) or (name, value) == ("split", "train")


def _refuse_hidden(where: str, top: str, name: str, value: Any, metadata: Collection[str]) -> None:
    """Raises ConversationRefused for tools, media, train flags and system prompts in what describes a row or message.

    Args:
        where: the column or message key, for the reason.
        top: its name.
        name: the name of the value: `top`, or a key of an object inside, at any depth, also in lists and JSON text.
        value: the value.
        metadata: `prompts.metadata`, which the advice extends.
    """
    if _is_empty(value):
        return
    is_text, is_number = isinstance(value, str), isinstance(value, int | float)
    if not is_number and (_has_word(name, TOOL_NAMES) or (name == "type" and is_text and _has_word(value, TOOL_NAMES))):
        raise ConversationRefused(TOOLS)
    if not is_number and _has_word(name, MEDIA_NAMES):
        raise ConversationRefused(MEDIA)
    is_cut_off = name in FINISH_KEYS and value not in FINISHED
    if name != top and (name in (*TRAIN_FLAGS, *SYSTEM_COLUMNS) or is_cut_off):
        raise ConversationRefused(f"{name} inside {where}, which is not read ({_with(metadata, top)} passes it over)")
    value = _parsed_if_json(value)
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        _refuse_hidden(where, top, str(key), inner, metadata)
    for inner in map(_parsed_if_json, value) if isinstance(value, list) else ():
        if isinstance(inner, Mapping) and any(inner.keys() >= set(keys) for keys in MESSAGE_KEYS.values()):
            raise ConversationRefused(
                f"messages inside {where}, which are not read ({_with(metadata, top)} passes them over)"
            )
        _refuse_hidden(where, top, top, inner, metadata)


def _parsed_if_json(value: Any) -> Any:
    """Returns what JSON text of an object or a list holds; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _has_word(name: str, beginnings: tuple[str, ...]) -> bool:
    """Returns whether a word of a name, such as `userImage_url`, begins with one of these."""
    words = re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(word.startswith(beginnings) for word in words)


def _with(metadata: Collection[str], *names: str) -> str:
    """Returns the argument that sets `prompts.metadata` and adds names: Hydra replaces a list as a whole."""
    shown = [
        name if PLAIN_NAME.fullmatch(name) else QuotedString(name, Quote.double).with_quotes()
        for name in (*metadata, *names)
    ]
    override = f"prompts.metadata=[{','.join(shown)}]"
    return override if shown == [*metadata, *names] else shlex.quote(override)


def _refuse_unread(what: str, names: list[str], metadata: Collection[str]) -> None:
    """Raises ConversationRefused if there are columns or keys that are neither honoured nor metadata."""
    if names:
        noun, verb, pronoun = (f"{what}s", "are", "them") if len(names) > 1 else (what, "is", "it")
        raise ConversationRefused(
            f"{noun} {', '.join(names)}, which {verb} not read ({_with(metadata, *names)} passes {pronoun} over)"
        )


def _with_system(messages: list[Message], text: str) -> list[Message]:
    """Returns the messages after a system prompt from a column, which may repeat that of the messages."""
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": text}, *messages]
    if messages[0]["content"].strip() != text.strip():
        raise ConversationRefused("a system prompt in a column that differs from that of the messages")
    return messages


def refuse_dropped_prompts(whole: str, messages: Sequence[Message]) -> None:
    """Raises ConversationRefused if the template leaves out a tool, or a text that is not an answer.

    White space may differ, and a tool's result may be written as a JSON string. Each message needs a place of its own:
    a short text may also occur within another one.
    """
    rest = _squeeze(whole)
    with_text = [message for message in messages if message["content"].strip()]
    for message in sorted(with_text, key=lambda message: len(_squeeze(message["content"])), reverse=True):
        forms = [message["content"]]
        if message["role"] == "tool":
            forms.append(json.dumps(message["content"], ensure_ascii=False)[1:-1])
        form = next((form for form in map(_squeeze, forms) if form in rest), None)
        if form is not None:
            rest = rest.replace(form, "\0", 1)
        elif message["role"] != "assistant":
            raise ConversationRefused(f"a {message['role']} message that the chat template does not render")
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
    for tool in messages[0].get("tools", []):
        name = tool["function"]["name"]
        if rest.count(_squeeze(name)) <= called.count(name):
            raise ConversationRefused("tools that the chat template does not render")


def _squeeze(text: str) -> str:
    return "".join(text.split())
