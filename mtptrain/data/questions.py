"""Groups conversations that ask the same question, so that a split keeps them together even if ids or responses differ.

A question is the first turn of the user together with the system prompt before it. Texts are compared after Unicode
normalisation (NFKC), case folding, and replacing every run of white space with one space.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence

SYSTEM_ROLES = ("system", "developer")


def normalise(text: str) -> str:
    """Returns the normalised text, which comparisons use."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_hash(text: str) -> str:
    """Returns a hash of 16 hexadecimal digits, which is the same for texts that are equal after normalisation."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()[:16]


def first_user_turn(messages: Sequence[Mapping[str, str]]) -> int | None:
    """Returns the index of the user's first message, or None if there is none."""
    return next((index for index, message in enumerate(messages) if message["role"] == "user"), None)


def question_group(messages: Sequence[Mapping[str, str]]) -> str:
    """Returns the name of the group of conversations that ask the same question.

    The name is the hash of the first user turn, followed by a dot and the hash of the system prompt if there is one. A
    conversation without a user turn is grouped only with exact copies of itself.
    """
    index = first_user_turn(messages)
    if index is None:
        return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()[:16]
    system = "\n".join(message["content"] for message in messages[:index] if message["role"] in SYSTEM_ROLES)
    question = text_hash(messages[index]["content"])
    return f"{question}.{text_hash(system)}" if normalise(system) else question
