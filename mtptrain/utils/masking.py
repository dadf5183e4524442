"""Hides what must not be shown or published: passwords in addresses, keys of servers, and the user's home directory."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
_SHORTEST_SECRET = 4
"""Shorter keys and passwords are no secrets, and hiding them would hide parts of ordinary words."""


def printable(text: str) -> str:
    """Returns a text of somebody else for a terminal: control characters and others without a glyph become escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def hide_passwords(value: Any) -> Any:
    """Returns a text, or a list or dict of such values, without the user and password of any address in it."""
    if isinstance(value, str):
        return re.sub(r"(?<=://)[^\s/?#]*@", f"{HIDDEN}@", value)
    if isinstance(value, dict):
        return {key: hide_passwords(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_passwords(each) for each in value]
    return value


def hide_secrets(text: str, secrets: Sequence[str]) -> str:
    """Returns a text without the secrets, longest first, and without the beginning of one that the text cuts off."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) < _SHORTEST_SECRET:
            continue
        text = text.replace(secret, HIDDEN)
        for length in range(len(secret) - 1, _SHORTEST_SECRET - 1, -1):
            if text.endswith(secret[:length]):
                text = text[:-length] + HIDDEN
                break
    return text


def hide_home(text: str) -> str:
    """Returns a text with `~` in place of the user's home directory, under its own name and with links resolved."""
    homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w.-])", "~", text)
    return text
