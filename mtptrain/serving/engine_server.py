"""Asks a running engine over HTTP, and reads the counters of its metrics page."""

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from mtptrain.serving.engine import EngineCounts
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import address_below, hide_passwords

Parsed = TypeVar("Parsed")

REQUEST_TIMEOUT_S = 600.0
SETTLED_AFTER_S = 0.3
"""Seconds after which unchanged counters are final."""
SETTLE_LIMIT_S = 10.0
"""Seconds within which the counters must stop changing after the last answer."""
SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from an answer."""
MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of an answer."""
UNKNOWN_PATH = (404, 405, 501)
"""Statuses with which a server says that it has no such page. llama.cpp answers 501 without `--metrics`."""
NO_PROXY = {"all://127.0.0.1": None, "all://localhost": None}
"""The addresses that a client asks without the proxy of the environment: servers of this machine."""
START = r"start `[^`]*` or correct the address"
"""The advice of errors about an address where no such engine answers, as a pattern.

`server_process` replaces it for a server that mtptrain has started.
"""
Counters = dict[tuple[str, int | None], int]
"""A server's counters, by name and draft position (None for counters without positions)."""
_SAMPLE = re.compile(r'^(?:vllm|llamacpp):(\w+)_total(?:\{(?:.*?\bposition="(\d+)")?.*\})? (\S+)$')


class EngineServer:
    """A running engine at a base URL."""

    name: str
    command: str
    """The program that starts such a server, for error messages."""

    def __init__(self, url: str) -> None:
        """Store the address of the server."""
        self.url = url.rstrip("/")
        self.shown_url = hide_passwords(self.url)
        """The address as messages show it."""
        # A compressed answer can be a thousand times as long as what arrives, so ask for one that is not compressed.
        headers = {"Accept-Encoding": "identity"}
        self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_S, follow_redirects=True, mounts=NO_PROXY)

    def counters(self) -> Counters:
        """Returns every counter by name and position, summed over engines and other labels."""
        return self.read("/metrics", _counters)

    def settled_counters(self) -> Counters:
        """Returns the counters once they stop changing: the server answers a request before counting its last step.

        Raises:
            UserError: they do not stop changing.
        """
        counters, deadline = self.counters(), time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(SETTLED_AFTER_S)
            if (later := self.counters()) == counters:
                return counters
            counters = later
        raise UserError(
            f"{self.shown_url}: the server must serve no other requests during the check, but its counters still "
            f"change {SETTLE_LIMIT_S:g} s after the last answer; repeat the check when it is idle"
        )

    def read(self, path: str, parse: Callable[[bytes], Parsed], content: dict[str, Any] | None = None) -> Parsed:
        """Returns what `parse` makes of the response to a GET request, or to a POST request with JSON content.

        Raises:
            UserError: the server does not answer, or the server answers with an error, or `parse` cannot read the
                answer.
        """
        body = self._fetch(path, content)
        try:
            return parse(body)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise self._not_this_engine(path, f"answers {_shown(body)}") from error

    def _fetch(self, path: str, content: dict[str, Any] | None) -> bytes:
        url = address_below(self.url, path)
        try:
            with self._client.stream("GET" if content is None else "POST", url, json=content) as response:
                body = _bounded(response)
            response.raise_for_status()
            return body
        except _Unbounded as error:
            raise self._not_this_engine(path, str(error)) from error
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            reason = f"answers {status}: {_shown(body)}"
            if content is None and status in UNKNOWN_PATH:
                raise self._not_this_engine(path, reason) from error
            raise UserError(
                f"serving.url: must answer every request, but {self.shown_url}{path} {reason}; see the server's log"
            ) from error
        except (httpx.TransportError, httpx.InvalidURL, OverflowError, UnicodeError) as error:
            raise UserError(
                f"serving.url: must be a running {self.name} server, but {self.shown_url} does not answer ({error}); "
                f"start `{self.command}` or correct the address"
            ) from error
        except httpx.HTTPError as error:
            raise self._not_this_engine(path, f"does not answer properly ({error})") from error

    def _not_this_engine(self, path: str, reason: str) -> UserError:
        return UserError(
            f"serving.url: must be a {self.name} server, but {self.shown_url}{path} {reason}; start `{self.command}` "
            "or correct the address"
        )


def counts_of(counters: Counters) -> EngineCounts | None:
    """Returns the drafting counters, which vLLM and llama.cpp name alike; None if the server does not draft."""
    if ("spec_decode_num_drafts", None) not in counters:
        return None
    by_position = {
        position: n
        for (name, position), n in counters.items()
        if name == "spec_decode_num_accepted_tokens_per_pos" and position is not None
    }
    accepted_at = [by_position[position] for position in sorted(by_position)]
    return EngineCounts(
        counters["spec_decode_num_drafts", None], counters["spec_decode_num_draft_tokens", None], accepted_at
    )


class _Unbounded(Exception):
    """An answer whose size has no bound that fits the memory."""


def _bounded(response: httpx.Response) -> bytes:
    """Returns an answer's body, unless it is compressed or longer than `MAX_BODY_BYTES`."""
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise _Unbounded(f"answers with Content-Encoding {encoding[:40]}, although it was asked not to compress")
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _Unbounded(f"answers more than {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


def _shown(body: bytes) -> str:
    """Returns the beginning of an answer, in one line."""
    return " ".join(body[:SHOWN_CHARACTERS].decode(errors="replace").split()) or "nothing"


def _counters(body: bytes) -> Counters:
    counters: Counters = {}
    for name, position, value in (match.groups() for match in map(_SAMPLE.match, body.decode().splitlines()) if match):
        key = (name, None if position is None else int(position))
        counters[key] = counters.get(key, 0) + int(float(value))
    return counters
