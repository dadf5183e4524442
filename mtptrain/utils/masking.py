"""Hides what must not be shown or published: passwords and queries of addresses, keys, and the home directory."""

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


def address_below(url: str, path: str) -> str:
    """Returns the address of a path below a base URL, whose query, such as a key, stays behind the path."""
    base, mark, query = url.partition("?")
    return base.rstrip("/") + path + mark + query


def hide_passwords(value: Any) -> Any:
    """Returns a text, or a list or dict of such values, without users, passwords and query values of addresses."""
    if isinstance(value, str):
        without_user = re.sub(r"(?<=://)[^\s/?#]*@", f"{HIDDEN}@", value)
        return re.sub(r"(?<=://)[^\s?#]*\?[^\s#'\"]*", _without_values, without_user)
    if isinstance(value, dict):
        return {key: hide_passwords(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_passwords(each) for each in value]
    return value


def _without_values(found: re.Match[str]) -> str:
    place, _, query = found[0].partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")]
    return place + "?" + "&".join(f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in pairs)


def hide_secrets(text: str, secrets: Sequence[str]) -> str:
    """Returns a text without the secrets, longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, HIDDEN)
    return text


def hide_home(text: str) -> str:
    """Returns a text with `~` in place of the user's home directory, under its own name and with links resolved."""
    homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w.-])", "~", text)
    return text
