"""Decodes prompts on a running vLLM server, and reads its counters."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from mtptrain.serving.exports import warn_of_untested_vllm
from mtptrain.serving.vllm_client import EngineCounts, EngineRun
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json
from mtptrain.utils.masking import hide_passwords

Read = TypeVar("Read")

MAX_CONCURRENT_REQUESTS = 16
REQUEST_TIMEOUT_S = 600.0
SETTLED_AFTER_S = 0.3
"""Seconds after which unchanged counters are final."""
SETTLE_LIMIT_S = 10.0
"""Seconds within which the counters must stop changing after the last answer."""
SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from an answer."""

MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of an answer."""
Counters = dict[tuple[str, int | None], int]
"""A server's counters, by name and draft position (None for counters without positions)."""
_SAMPLE = re.compile(r'^vllm:(\w+)_total(?:\{(?:.*?\bposition="(\d+)")?[^}]*\})? (\S+)$')


class VllmServer:
    """A running `vllm serve` at a base URL."""

    def __init__(self, url: str, *, is_ours: bool = False) -> None:
        """Ask the server for its version, model and context length.

        Args:
            url: its base URL.
            is_ours: whether this program started it, with a Python whose version of vLLM it has checked.

        Raises:
            UserError: the server does not answer, or the server is not vLLM.
        """
        self.url = url.rstrip("/")
        self.shown_url = hide_passwords(self.url)
        """The address as messages show it."""
        # A compressed answer can be a thousand times as long as what arrives, so ask for one that is not compressed.
        headers = {"Accept-Encoding": "identity"}
        self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_S, follow_redirects=True)
        self.version = self._read("/version", _version)
        if not is_ours:
            warn_of_untested_vllm(self.version, f"serving.url={self.shown_url}")
        self.model, self.root, self.max_model_len = self._read("/v1/models", _model)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew. Several requests run at once.

        Raises:
            UserError: the server does not answer, or the server answers with an error, or the server serves other
                requests in the meantime, which makes its counters useless.
        """
        before = self.counters()

        def ask(prompt: Sequence[int]) -> tuple[list[int], list[int] | None]:
            request = {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                # Set all values: omitted ones come from generation_config.json, and penalties affect greedy decoding.
                **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
                **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
                "ignore_eos": True,
                "stop_token_ids": list(stop_token_ids),
                "return_token_ids": True,
            }
            return self._read("/v1/completions", _completion, request)

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            answers = list(pool.map(ask, prompts))
        accepted = [rounds for _, rounds in answers]
        return EngineRun(
            self.version,
            [tokens for tokens, _ in answers],
            self.counts_since(before, len(prompts)),
            None if all(rounds is None for rounds in accepted) else [rounds or [] for rounds in accepted],
        )

    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        """Returns how much the drafting counters grew; None if the server does not draft.

        Raises:
            UserError: the server finished other requests than these in the meantime, or its counters keep changing.
        """
        after = self._settled_counters()
        counts = {name: after[name] - before.get(name, 0) for name in after}
        num_finished = sum(count for (name, _), count in counts.items() if name == "request_success")
        if num_finished != num_requests:
            raise UserError(
                f"{self.shown_url}: the server must serve no other requests during the check, but finished "
                f"{num_finished} requests instead of {num_requests}; repeat the check when it is idle"
            )
        return _counts(counts)

    def counters(self) -> Counters:
        """Returns every counter by name and position, summed over engines and other labels."""
        return self._read("/metrics", _counters)

    def _settled_counters(self) -> Counters:
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

    def _read(self, path: str, read: Callable[[bytes], Read], content: dict[str, Any] | None = None) -> Read:
        """Returns what `read` makes of the response to a GET request, or to a POST request with JSON content.

        Raises:
            UserError: the server does not answer, or the server answers with an error, or `read` cannot read the
                answer.
        """
        body = self._fetch(path, content)
        try:
            return read(body)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise self._not_vllm(path, f"answers {_shown(body)}") from error

    def _fetch(self, path: str, content: dict[str, Any] | None) -> bytes:
        url = self.url + path
        try:
            with self._client.stream("GET" if content is None else "POST", url, json=content) as response:
                body = _bounded(response)
            response.raise_for_status()
            return body
        except _Unbounded as error:
            raise self._not_vllm(path, str(error)) from error
        except httpx.HTTPStatusError as error:
            reason = f"answers {error.response.status_code}: {_shown(body)}"
            if content is None:
                raise self._not_vllm(path, reason) from error
            raise UserError(
                f"serving.url: must answer every prompt, but {self.shown_url}{path} {reason}; see the server's log"
            ) from error
        except (httpx.TransportError, httpx.InvalidURL, OverflowError, UnicodeError) as error:
            raise UserError(
                f"serving.url: must be a running vLLM server, but {self.shown_url} does not answer ({error}); start "
                "`vllm serve` or correct the address"
            ) from error
        except httpx.HTTPError as error:
            raise self._not_vllm(path, f"does not answer properly ({error})") from error

    def _not_vllm(self, path: str, reason: str) -> UserError:
        return UserError(
            f"serving.url: must be a vLLM server, but {self.shown_url}{path} {reason}; start `vllm serve` or correct "
            "the address"
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


def _version(body: bytes) -> str:
    version = parse_json(body, "version")["version"]
    if not isinstance(version, str):
        raise TypeError
    return version


def _model(body: bytes) -> tuple[str, str, int]:
    """Returns the model's name, the path or hub name that the server was started with, and its context length."""
    model = parse_json(body, "models")["data"][0]
    name, length = model["id"], model["max_model_len"]
    root = model.get("root") or name
    if not isinstance(name, str) or not isinstance(root, str) or type(length) is not int or length < 1:
        raise TypeError
    return name, root, length


def _completion(body: bytes) -> tuple[list[int], list[int] | None]:
    """Returns the tokens of a completion, and the number of accepted drafts in each round.

    The second is None unless the server runs with `--per-request-spec-decode-metrics detailed`.
    """
    answer = parse_json(body, "completion")
    tokens = answer["choices"][0]["token_ids"]
    accepted = ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    for numbers in (tokens, accepted or []):
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise TypeError
    return tokens, accepted


def _counters(body: bytes) -> Counters:
    counters: Counters = {}
    for name, position, value in (match.groups() for match in map(_SAMPLE.match, body.decode().splitlines()) if match):
        key = (name, None if position is None else int(position))
        counters[key] = counters.get(key, 0) + int(float(value))
    return counters


def _counts(counters: Counters) -> EngineCounts | None:
    """Returns the drafting counters; None if the server does not draft."""
    if ("spec_decode_num_drafts", None) not in counters:
        return None
    per_position = {
        position: n for (name, position), n in counters.items() if name == "spec_decode_num_accepted_tokens_per_pos"
    }
    accepted_at = [per_position[position] for position in sorted(p for p in per_position if p is not None)]
    return EngineCounts(
        counters["spec_decode_num_drafts", None], counters["spec_decode_num_draft_tokens", None], accepted_at
    )
