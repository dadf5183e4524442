"""Asks a running engine over HTTP, and reads the counters of its metrics page."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx

from mtptrain.engines.requests import EngineCounts, EngineRun, Question, Questions, Requests
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json
from mtptrain.utils.masking import address_below, hide_passwords

Parsed = TypeVar("Parsed")

REQUEST_TIMEOUT_S = 600.0
SETTLED_AFTER_S = 0.3
"""Seconds after which unchanged counters are final."""
SETTLE_LIMIT_S = 10.0
"""Seconds within which the counters must stop changing after the last answer."""
SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from an answer."""
NO_PROXY = {"all://127.0.0.1": None, "all://localhost": None}
"""The addresses that a client asks without the proxy of the environment: servers of this machine."""
UNREADABLE = (LookupError, AttributeError, TypeError, ValueError, OverflowError)
"""The errors of reading an answer that is another than an engine's."""
Counters = dict[tuple[str, int | None], int]
"""A server's counters, by name and draft position (None for counters without positions)."""
_SAMPLE = re.compile(r'^\w+:(\w+)_total(?:\{(?:.*?\bposition="(\d+)")?.*\})? (\S+)$')


class EngineServer(ABC):
    """A running engine at a base URL."""

    name: str
    """The engine's name that users know."""
    program: str
    """The command that starts such a server."""
    options = ""
    """Options that the command needs, for error messages."""
    context_option: str
    """The command's option that sets the length of the context."""
    base_path = "/v1"
    """The path below which the server completes prompts of token ids."""
    kept_connections: int | None = None
    """Maximum number of idle connections; None keeps all. A server may close them after each answer."""
    place = "serving.url"
    """The setting that names it, for error messages."""
    answer_limit_s = REQUEST_TIMEOUT_S
    may_round = False
    """Whether the server's weights are rounded, whatever `acceptance.dtype` is."""
    version: str
    num_slots: int | None = None
    """Number of requests that the server answers at a time, if it says so; others wait."""
    root: str
    """The model that the server was started with."""
    max_model_len: int

    def __init__(self, url: str, log_path: Path | None = None) -> None:
        """Store the address of the server, and the log of one that mtptrain has started."""
        self.url = url.rstrip("/")
        self.shown_url = hide_passwords(self.url)
        """The address as messages show it."""
        self._advice = f"see the server's log, start `{self.program}{self.options}` or correct the address"
        if log_path is not None:
            self.place, self._advice = f"{self.program}, whose log is {log_path}", "read its log"
        self._client = self.client()

    def client(self, max_connections: int | None = None) -> httpx.Client:
        """Returns a client that asks a server of this machine without the proxy of the environment."""
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=self.kept_connections)
        return httpx.Client(timeout=self.answer_limit_s, follow_redirects=True, limits=limits, mounts=NO_PROXY)

    @abstractmethod
    def check_model(self, target: TargetFiles, head_dir: Path) -> None:
        """Raises UserError unless the server serves the target, or the export if that holds the target too."""

    def check_room(self, needed_tokens: int, concurrency: int = 1) -> None:
        """Raises UserError if requests must wait, or if the context does not hold the longest prompt, its answer and
        spare drafts."""
        if self.num_slots is not None and self.num_slots < concurrency:
            raise UserError(
                f"serving.url: the server must answer {concurrency} requests at a time, but has {self.num_slots} slots;"
                f" start it with -np {concurrency}, or lower serving_check.concurrency"
            )
        if self.max_model_len < needed_tokens:
            raise UserError(
                f"serving.url: the server's context must hold {needed_tokens} tokens (the longest prompt, "
                "acceptance.max_new_tokens and 2 x acceptance.num_speculative_tokens), but holds "
                f"{self.max_model_len}; start it with {self.context_option} {needed_tokens}"
            )

    @abstractmethod
    def generate(self, asked: Questions) -> EngineRun:
        """Returns the answers to prompts of token ids, and how much the counters grew.

        Raises UserError if the server serves other requests in the meantime, which makes its counters useless.
        """

    def each_answer(self, asked: Questions, ask: Callable[[Sequence[int]], Parsed]) -> list[Parsed]:
        """Returns the answers to all prompts, of which as many are in flight as `asked` says."""
        with ThreadPoolExecutor(asked.concurrency) as pool:
            return list(pool.map(ask, asked.prompts))

    @abstractmethod
    def chat_ids(self, chat: Mapping[str, Any]) -> list[int]:
        """Returns the prompt that the server makes of `messages` with `chat_template_kwargs`, as token ids."""

    @classmethod
    def answer_request(cls, question: Question) -> dict[str, Any]:
        """Returns the content of a request to `base_path`/completions for one answer as token ids.

        By default it is that of OpenAI's completions, with what vLLM and SGLang add.
        """
        return {
            "model": question.model,
            "prompt": question.prompt,
            "max_tokens": question.max_new_tokens,
            **question.sampling,
            "top_k": question.sampling["top_k"] or -1,  # -1 means all tokens in both engines
            "seed": question.seed,
            "stop_token_ids": list(question.stop_token_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    @classmethod
    def answer_of(cls, content: Any, question: Question) -> tuple[list[int], str, bool]:
        """Returns the token ids of an answer with its end, its text, and whether it was cut; `UNREADABLE` otherwise."""
        [choice] = content["choices"]
        if (reason := choice["finish_reason"]) not in ("stop", "length"):
            raise ValueError(f"finish_reason must be stop or length, but is {reason}")
        return choice["token_ids"], choice["text"], reason == "length"

    @abstractmethod
    def streamed_request(self, prompt: Sequence[int], requests: Requests, index: int) -> tuple[str, dict[str, Any]]:
        """Returns the path and content of request `index` of a load, whose answer is streamed.

        No request may read a prefix that another one left in the cache.
        """

    @abstractmethod
    def step_of(self, message: dict[str, Any]) -> tuple[object, int]:
        """Returns what a message of a stream has: a value that all messages of a step share, and a number of tokens.

        The value is None for a message without tokens. The numbers of an answer's messages add up to its tokens.
        """

    @abstractmethod
    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        """Returns how much the drafting counters grew; None if the server does not draft."""

    def counters(self) -> Counters:
        """Returns every counter by name and position, summed over engines and other labels."""
        return self.read("/metrics", _counters)

    def growth_since(self, before: Counters) -> Counters:
        """Returns how much each counter grew, once all are still: a server answers before it counts the last step."""
        counters, deadline = self.counters(), time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(SETTLED_AFTER_S)
            if (later := self.counters()) == counters:
                return {name: number - before.get(name, 0) for name, number in counters.items()}
            counters = later
        raise self.is_busy(f"its counters still change {SETTLE_LIMIT_S:g} s after the last answer")

    def is_busy(self, does: str) -> UserError:
        """Returns the error of a server that answers other requests than ours."""
        return UserError(
            f"{self.place}: the server must serve no other requests during the check, but {does}; repeat the check "
            "when it is idle"
        )

    def read(self, path: str, parse: Callable[[bytes], Parsed], content: dict[str, Any] | None = None) -> Parsed:
        """Returns what `parse` makes of the answer to a GET, or to a POST of JSON; raises UserError without one."""
        response, url = None, address_below(self.url, path)
        try:
            response = self._client.request("GET" if content is None else "POST", url, json=content)
            response.raise_for_status()
            return parse(response.content)
        except (httpx.HTTPError, httpx.InvalidURL, *UNREADABLE) as error:
            does = f"does not answer ({error})"
            if response is not None:
                does = f"answers {response.status_code}: {shown(response.content)}"
            raise UserError(
                f"{self.place}: must be a running {self.name} server that answers every request, but "
                f"{self.shown_url}{path} {does}; {self._advice}"
            ) from error


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


def token_ids(body: bytes) -> list[int]:
    """Returns the tokens of an answer to /tokenize, which vLLM and llama.cpp name alike."""
    return [int(token) for token in parse_json(body, "tokens")["tokens"]]


def shown(body: bytes) -> str:
    """Returns the beginning of an answer, in one line."""
    return " ".join(body[:SHOWN_CHARACTERS].decode(errors="replace").split()) or "nothing"


def _counters(body: bytes) -> Counters:
    counters: Counters = {}
    for name, position, value in (match.groups() for match in map(_SAMPLE.match, body.decode().splitlines()) if match):
        key = (name, None if position is None else int(position))
        counters[key] = counters.get(key, 0) + int(float(value))
    return counters
