"""Exchanges JSON with a server that is not trusted: its answers are bounded, and its messages show no secrets."""

import asyncio
import json
from base64 import b64encode
from typing import Any
from urllib.parse import unquote

import httpx
from tqdm import tqdm

from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json
from mtptrain.utils.masking import address_below, hide_passwords, hide_secrets, printable

SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from a server's message."""
MAX_ERROR_BYTES = 2**16
"""Maximum number of bytes that are read of an error's body."""
MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of a response's body. The ids of a prompt of 128k tokens take about 1 MB."""


class RequestFailed(Exception):
    """A request failed for good.

    In the checks at the start this ends the program. Later, the conversation is left out of this run, and the report
    shows the message.
    """


class Transport:
    """Sends requests to the server at an address."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        """
        Raises:
            UserError: the address has a user or password that is not percent-encoded.
        """
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._secrets = secrets_of(self._url, api_key)
        self.url = self._shown_url(self._url)
        """The address as messages show it, without a password."""
        self._redirects: set[str] = set()
        # A compressed body can be a thousand times as long as what arrives, so ask for one that is not compressed.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._ssl_context = httpx.create_ssl_context()

    def fetch(self, path: str, request: dict[str, Any] | None = None, is_beside: bool = False) -> Any:
        """Returns the JSON that the server answers to a GET, or to a POST if there is a request.

        Args:
            path: the path below the address, or beside its `/v1` if `is_beside`.
            request: the content of a POST.

        Raises:
            TimeoutError, httpx.HTTPError, httpx.InvalidURL, RequestFailed: as `_fetch_body`.
            UserError: the answer is not JSON.
        """
        base, mark, query = self._url.partition("?")
        base = base.rstrip("/").removesuffix("/v1") if is_beside else base
        url = address_below(base + mark + query, path)
        try:
            where = f"responses.url: the answer of {self._shown_url(url)}"
            return parse_json(asyncio.run(self._fetch_body(url, request)), where, "correct the address")
        except ExceptionGroup as group:  # a port out of range, in `url` or in the target of a redirect
            raise httpx.ConnectError(str(group.exceptions[0])) from group

    async def _fetch_body(self, url: str, request: dict[str, Any] | None) -> bytes:
        """GET `url`, or POST `request` to it, and return the body.

        httpx applies its own timeout to each read separately; `asyncio.timeout` limits the whole exchange.

        Raises:
            TimeoutError: the exchange takes longer than `timeout_s`, from connecting to the last byte.
            httpx.HTTPStatusError: the status is an error; the message quotes the body.
            httpx.HTTPError: the connection failed.
            httpx.InvalidURL: `url` cannot be parsed.
            RequestFailed: the body is too long or compressed.
        """
        method, data = ("GET", None) if request is None else ("POST", json.dumps(request).encode())
        async with (
            asyncio.timeout(self._timeout_s),
            httpx.AsyncClient(
                headers=self._headers, verify=self._ssl_context, timeout=None, follow_redirects=True
            ) as client,
            client.stream(method, url, content=data) as response,
        ):
            self._announce_redirect(url, response)
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise RequestFailed(
                    f"the server's answer must not be compressed, but has Content-Encoding {self.quote(encoding)}"
                )
            if not response.is_success:
                message = (
                    f"the server answers {response.status_code}: "
                    f"{self.quote(await _error_text(response) or response.reason_phrase)}"
                )
                raise httpx.HTTPStatusError(message, request=response.request, response=response)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RequestFailed(f"the server's answer is longer than {MAX_BODY_BYTES:,} bytes")
            return bytes(body)

    def _announce_redirect(self, url: str, response: httpx.Response) -> None:
        """Print once where a redirect leads, because the prompts go there."""
        shown = self._shown_url(str(response.url))
        if response.history and shown not in self._redirects:
            self._redirects.add(shown)
            tqdm.write(f"responses.url: {self._shown_url(url)} is redirected to {shown}")

    def _shown_url(self, url: str) -> str:
        return self._hide(hide_passwords(url))

    def _hide(self, text: str) -> str:
        return hide_secrets(text, self._secrets)

    def quote(self, text: str) -> str:
        """Returns the beginning of a text of the server, which may repeat what it was sent, without the secrets."""
        hidden = self._hide(text[: SHOWN_CHARACTERS + max(map(len, self._secrets), default=0)])
        return printable(hidden[:SHOWN_CHARACTERS])

    def reason(self, error: Exception) -> str:
        return (
            "timed out"
            if isinstance(error, TimeoutError)
            else printable(self._hide(str(error))) or type(error).__name__
        )


def secrets_of(url: str, api_key: str | None) -> list[str]:
    """Returns what a server is sent to identify the user, in each form in which its messages may repeat it.

    Raises:
        UserError: the address has an `@` that does not end its user and password.
    """
    try:
        user_info = httpx.URL(url).userinfo.decode()
    except httpx.InvalidURL:
        user_info = ""
    if "@" in url and not user_info:
        raise UserError(
            "responses.url: the user and password must be percent-encoded, but hold a character such as /, ? or # as "
            "it is; write it as %2F, %3F or %23, or the at sign of a path as %40"
        )
    password = user_info.partition(":")[2]
    in_query = [pair.partition("=")[2] or pair for pair in url.partition("?")[2].split("&")]
    secrets = [api_key or "", password, unquote(password), b64encode(unquote(user_info).encode()).decode()]
    secrets += [*in_query, *map(unquote, in_query)]
    return [form for secret in secrets if secret for form in dict.fromkeys((secret, json.dumps(secret)[1:-1]))]


async def _error_text(response: httpx.Response) -> str:
    """Returns the beginning of an error's body, or as much of it as arrives before the connection breaks."""
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ERROR_BYTES:
                break
    except httpx.HTTPError:  # the connection broke off
        pass
    return body.decode(errors="replace").strip()
