"""Which conversations ask the same question: they fall on one side of every split, whatever their ids and answers are.

A question is the first turn of the user together with the system prompt before it. Texts are compared after the Unicode
normalisation NFKC and case folding, with every run of white space as one space.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence

SYSTEM_ROLES = ("system", "developer")


def normalise(text: str) -> str:
    """Returns the text in the form in which it is compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_hash(text: str) -> str:
    """Returns 16 hexadecimal digits that are equal for texts that normalise alike."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()[:16]


def first_user_turn(messages: Sequence[Mapping[str, str]]) -> int | None:
    """Returns the place of the user's first message; None where the user says nothing."""
    return next((place for place, message in enumerate(messages) if message["role"] == "user"), None)


def question_group(messages: Sequence[Mapping[str, str]]) -> str:
    """Returns the name of the group of conversations that ask the same question.

    It is the hash of the first user turn, followed by a dot and the hash of the system prompt where there is one. A conversation in
    which the user says nothing shares its group with its copies alone.
    """
    place = first_user_turn(messages)
    if place is None:
        return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()[:16]
    system = "\n".join(message["content"] for message in messages[:place] if message["role"] in SYSTEM_ROLES)
    asked = text_hash(messages[place]["content"])
    return f"{asked}.{text_hash(system)}" if normalise(system) else asked
