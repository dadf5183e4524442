"""Defines a conversation: its messages, and the question that it has in common with others.

A split keeps conversations that ask the same question together, even if ids or responses differ. A question is the
first turn of the user together with the system prompt before it. Texts are compared after Unicode normalisation (NFKC),
case folding, and replacing every run of white space with one space.
"""

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from typing import Any, Required, TypedDict

SYSTEM_ROLES = ("system", "developer")


class ConversationRefused(ValueError):
    """Raised for a row of somebody's data that must be left out. Its message is the reason shown in the report."""


class Message(TypedDict, total=False):
    role: Required[str]
    """One of `mtptrain.settings.data.ROLES`."""
    content: Required[str]
    """Its text; empty if an answer only calls tools."""
    tool_call_id: str
    name: str
    """Name of the tool whose result this is."""
    tool_calls: list[dict[str, Any]]
    """Calls of an answer, as `mtptrain.data.tool_calls.read_calls` returns them."""
    reasoning_content: str
    """Reasoning of an answer, if the row has it apart from the content."""
    weight: str
    """"0" for an answer that is not to be trained, otherwise left out. A number instead of the text would change the
    names of conversations, which are hashes of their messages."""
    tools: list[dict[str, Any]]
    """The tools of the conversation, in its first message, as `mtptrain.data.tool_calls.read_tools` returns them."""


def normalise(text: str) -> str:
    """Returns the normalised text, which comparisons use."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def text_hash(text: str) -> str:
    """Returns a hash that is the same for texts that are equal after normalisation."""
    return short_hash(normalise(text).encode())


def first_user_turn(messages: Sequence[Message]) -> int | None:
    """Returns the index of the user's first message, or None if there is none."""
    return next((index for index, message in enumerate(messages) if message["role"] == "user"), None)


def question_group(messages: Sequence[Message]) -> str:
    """Returns the name of the group of conversations that ask the same question.

    The name is the hash of the first user turn, followed by a dot and the hash of the system prompt if there is one. A
    conversation without a user turn is grouped only with exact copies of itself.
    """
    index = first_user_turn(messages)
    if index is None:
        return short_hash(json.dumps(list(messages)).encode())
    system = "\n".join(message["content"] for message in messages[:index] if message["role"] in SYSTEM_ROLES)
    question = text_hash(messages[index]["content"])
    return f"{question}.{text_hash(system)}" if normalise(system) else question
