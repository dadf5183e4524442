"""The client of a running server: an OpenAI-compatible one (vLLM, SGLang) or that of an engine that was started.

Prompts and responses are token ids.

What the server says is shown without the secrets that it was sent.
"""

import asyncio
import json
import os
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import httpx
from transformers import PreTrainedTokenizerBase

from mtptrain.config import ResponsesConfig
from mtptrain.data.chat_template import INCOMPLETE, decoded
from mtptrain.engines.requests import Question
from mtptrain.engines.server import NO_PROXY, EngineServer
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json
from mtptrain.utils.masking import address_below, hide_passwords, hide_secrets, printable

from .dialogue import Prompt, Response, Sampling, decode_response

API_KEY = "OPENAI_API_KEY"
"""The environment variable of the server's key, which is that of OpenAI's own client."""
VERSIONS = (
    ("vLLM", "/version", "version"),
    ("SGLang", "/server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
)
"""The engines with the paths and the keys of their versions."""
MAX_RETRIES = 3
"""How often a failed request is repeated."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from the server."""


class RequestFailed(Exception):
    """A request failed. The message, which the report shows, has no secrets."""


class CompletionServer:
    def __init__(
        self,
        url: str,
        settings: ResponsesConfig,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        kind: type[EngineServer] = EngineServer,
        model: str | None = None,
        check_running: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the server for its models, among which `model` must be; None for `responses.model` or the only one.

        `kind` says how the server is asked, and `check_running` raises UserError once it has ended.
        """
        self._kind, self._check_running = kind, check_running
        api_key = os.environ.get(API_KEY, "")
        if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
            raise UserError(
                f"{API_KEY}: must hold a key of printable ASCII characters without spaces, but holds others, such as a "
                "line break; set this environment variable again"
            )
        self._url, self._secrets = url, secrets_of(url, api_key)
        self.url = hide_secrets(hide_passwords(url), self._secrets)
        """The address as messages show it, without secrets."""
        self._settings, self._sampling = settings, sampling
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._ssl_context = httpx.create_ssl_context()
        served = self._context_lengths()
        wanted = settings.model if model is None else model
        self.model = next(iter(served)) if wanted is None and len(served) == 1 else str(wanted)
        if self.model not in served and model is not None:
            raise UserError(
                f"responses.engine: the server at {self.url} must be the one that was started for this run, but serves "
                f"{self.quote(', '.join(served)) or 'nothing'}, so that another program has its port; start again"
            )
        if self.model not in served:
            raise UserError(
                "responses.model: must be the target's name on the server, and may be left out if there is one model, "
                f"but is {wanted}, and {self.url} serves {self.quote(', '.join(served)) or 'none'}; correct "
                "it, or start the server with that model"
            )
        self.context_tokens = served[self.model]
        """Maximum tokens of prompt plus response; None if the server does not report it."""
        self.version = self._version()

    def _context_lengths(self) -> dict[str, int | None]:
        """Returns the context length of each model by name; None if the server does not report it."""
        try:
            content = asyncio.run(self._fetch("/models"))
            return {str(model["id"]): model.get("max_model_len") or None for model in content["data"]}
        except RequestFailed as failure:
            problem = str(failure)
        except (LookupError, TypeError, AttributeError):
            problem = f"the server answers {self.quote(json.dumps(content))}"
        raise UserError(
            "responses.url: must be the base URL of a running OpenAI-compatible server, such as "
            f"http://localhost:8000/v1, but at {address_below(self.url, '/models')} {problem}; start the "
            f"server, correct the address, or set the environment variable {API_KEY} to its key"
        )

    def _version(self) -> str | None:
        """Returns the engine's name and version, which each reports at a path of its own."""
        for engine, path, key in VERSIONS:
            with suppress(RequestFailed, LookupError, TypeError):
                return f"{engine} {self.quote(str(asyncio.run(self._fetch(path, is_beside=True))[key]))}"
        return None

    def check(self, prompt_ids: list[int]) -> None:
        """Check that the server completes a prompt given as token ids, by requesting one token."""
        try:
            question = self._question(Prompt(prompt_ids, 0), 1)
            content = asyncio.run(self._fetch("/completions", self._kind.answer_request(question)))
            self._parse(content, question)
        except RequestFailed as failure:
            raise UserError(
                f"responses.url: {self.url} must complete prompts given as token ids and return token ids, but "
                f"{failure}; serve the target there, with its own tokenizer, by an engine that knows return_token_ids"
            ) from None

    async def complete(self, prompt: Prompt) -> Response:
        """Returns the response to a prompt, or raises RequestFailed."""
        question = self._question(prompt, self._sampling.max_new_tokens)
        request = self._kind.answer_request(question)
        try:
            content = await self._fetch("/completions", request, num_retries=MAX_RETRIES)
        except RequestFailed:
            self._check_running()
            raise
        return self._parse(content, question)

    def _question(self, prompt: Prompt, max_new_tokens: int) -> Question:
        sampling, stop_token_ids = self._sampling.settings, self._sampling.stop_token_ids
        return Question(self.model, prompt.token_ids, max_new_tokens, sampling, stop_token_ids, prompt.seed)

    def _parse(self, content: Any, question: Question) -> Response:
        """Returns the response in a completion, whose text must be that of its token ids for the target's tokenizer."""
        prompt_ids, most = question.prompt, question.max_new_tokens
        try:
            token_ids, text, is_cut = self._kind.answer_of(content, question)
            if len(token_ids) > most:
                raise ValueError(f"at most {most} tokens must be generated, but are {len(token_ids)}")
            if not all(type(token) is int and 0 <= token < self._vocab_size for token in token_ids):
                raise ValueError(f"token_ids must be integers in [0, {self._vocab_size})")
            has_end = not is_cut and token_ids[-1:] and token_ids[-1] in self._sampling.stop_token_ids
            kept, end = (token_ids[:-1], token_ids[-1:]) if has_end else (token_ids, [])
            shown = decode_response(self._tokenizer, prompt_ids, kept)
            # Servers differ in spaces and incomplete characters, and some show the token that ends a response.
            if squashed(text) not in (squashed(shown), squashed(shown + decoded(self._tokenizer, end))):
                raise ValueError("the text must be that of token_ids with the target's tokenizer, but is another")
            return Response(kept, end, is_cut)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RequestFailed(
                f"the server's answer is not a completion ({type(error).__name__}: {self.quote(str(error))}): "
                f"{self.quote(json.dumps(content))}"
            ) from None

    async def _fetch(
        self, path: str, request: dict[str, Any] | None = None, is_beside: bool = False, num_retries: int = 0
    ) -> Any:
        """Returns the JSON that the server answers to a GET, or to a POST of a request.

        The path is below the address, or beside its `/v1` if `is_beside`. The request is repeated if the server is busy
        or unreachable, or if its answer is not JSON.
        """
        base, mark, query = self._url.partition("?")
        url = address_below((base.rstrip("/").removesuffix("/v1") if is_beside else base) + mark + query, path)
        options: dict[str, Any] = {"headers": self._headers, "verify": self._ssl_context}
        options |= {"follow_redirects": True, "mounts": NO_PROXY}
        for attempt in range(num_retries + 1):
            asked_s = 0.0
            try:
                # httpx would apply its own timeout to each read.
                async with (
                    asyncio.timeout(self._settings.timeout_s),
                    httpx.AsyncClient(**options, timeout=None) as client,
                ):
                    response = await client.request("POST" if request else "GET", url, json=request)
                if response.is_success:
                    return parse_json(response.content, "the server's answer", "see its log")
            except (OSError, httpx.HTTPError, httpx.InvalidURL, UnicodeError, ExceptionGroup) as error:
                # The last two are raised for a host that is no name and for a port out of range.
                reason = self.quote(str(error)) or type(error).__name__
                problem = f"the server does not answer: {'timed out' if isinstance(error, TimeoutError) else reason}"
            except UserError as error:
                problem = self.quote(str(error))
            else:
                said = self.quote(response.text.strip() or response.reason_phrase)
                problem = f"the server answers {response.status_code}: {said}"
                if response.status_code != 429 and response.status_code < 500:
                    break
                after = response.headers.get("Retry-After", "")
                asked_s = min(float(after), self._settings.timeout_s) if after.isdecimal() else 0.0
            if attempt < num_retries:
                await asyncio.sleep(max(asked_s, min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)))
        raise RequestFailed(problem)

    def quote(self, text: str) -> str:
        """Returns the beginning of a text of the server, which may repeat what it was sent, without the secrets."""
        return printable(hide_secrets(text, self._secrets)[:SHOWN_CHARACTERS])


def secrets_of(url: str, api_key: str) -> list[str]:
    """Returns what a server is sent to identify the user, in each form in which its messages may repeat it."""
    try:
        user_info = httpx.URL(url).userinfo.decode()
    except httpx.InvalidURL:
        user_info = ""
    if "@" in url and not user_info:
        raise UserError(
            "responses.url: the user and password must be percent-encoded, but hold a character such as /, ? or # as "
            "it is; write it as %2F, %3F or %23, or the at sign of a path as %40"
        )
    in_query = [pair.partition("=")[2] or pair for pair in url.partition("?")[2].split("&")]
    quoted = [*user_info.split(":", 1), *in_query]
    secrets = [api_key, *quoted, *map(unquote, quoted), b64encode(unquote(user_info).encode()).decode()]
    return [form for secret in secrets for form in {secret, json.dumps(secret)[1:-1]}]


def squashed(text: str) -> str:
    return "".join(text.replace(INCOMPLETE, "").split())
