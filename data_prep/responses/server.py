"""Regenerates conversations on a running OpenAI-compatible server (vLLM, SGLang). Prompts are sent as token ids."""

import asyncio
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Event, Lock
from typing import Any

import httpx

from mtptrain.data.chat_template import EndlessTemplate
from mtptrain.utils.files import parse_json

from .dialogue import Dialogue, Prompt, RegeneratedConversation, Response, Sampling

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
SHOWN_CHARACTERS = 200
"""Maximum number of characters that an error quotes from a server's message."""
MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of a response's body. The ids of a prompt of 128k tokens take about 1 MB."""


class RequestFailed(Exception):
    """A request failed for good. Its conversation is left out of this run, and the report shows the message."""


class CompletionServer:
    """Client of a running server."""

    def __init__(
        self,
        url: str,
        model: str | None,
        sampling: Sampling,
        vocab_size: int,
        *,
        max_retries: int,
        timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        """Ask the server for its models.

        Raises:
            ConnectionError: no server responds.
            ValueError: the server is not OpenAI-compatible, rejects the API key, does not serve `model`, or, if `model`
                is None, does not serve exactly one model.
        """
        self.url = url.rstrip("/")
        self.max_retries = max_retries
        self._timeout_s = timeout_s
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._ssl_context = httpx.create_ssl_context()
        served = self._models()
        self.model = self._choose_model(model, list(served))
        self.context_tokens = served[self.model]
        """Maximum tokens of prompt plus response; None if the server does not report it."""
        self.version = self._version()

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Check that the server completes prompts given as token ids, by requesting one token.

        Raises:
            ConnectionError: the server does not respond.
            ValueError: the server does not complete such prompts, or counts more or fewer prompt tokens than were sent.
        """
        content = self._fetch_checked("/completions", self._request(Prompt(list(prompt_ids), 0)) | {"max_tokens": 1})
        try:
            self._parse(content)
        except RequestFailed as failure:
            raise ValueError(
                f"responses.url: {self.url} must complete prompts given as token ids, but {failure}; serve the target "
                "there"
            ) from None
        usage = content.get("usage")
        num_read = usage.get("prompt_tokens", len(prompt_ids)) if isinstance(usage, dict) else len(prompt_ids)
        if num_read != len(prompt_ids):
            raise ValueError(
                f"responses.url: {self.url} must read a prompt of {len(prompt_ids)} token ids unchanged, but counts "
                f"{num_read} tokens; use a server that does not change prompts"
            )

    def complete(self, prompt: Prompt, stopping: Event) -> Response:
        """Returns the response to a prompt.

        If the server is busy or unreachable, or its answer is not JSON, retries up to `max_retries` times, unless
        `stopping` is set.

        Raises:
            RequestFailed: the server refused the request or did not answer with a completion, all retries failed, or
                `stopping` was set before the next retry.
        """
        for attempt in range(self.max_retries + 1):
            waiting_s = min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
            try:
                return self._parse(self._fetch("/completions", self._request(prompt)))
            except httpx.HTTPStatusError as error:
                failure, retry_after_s = str(error), error.response.headers.get("Retry-After", "")
                if error.response.status_code != 429 and error.response.status_code < 500:
                    break
                waiting_s = max(
                    waiting_s, min(float(retry_after_s), self._timeout_s) if retry_after_s.isdecimal() else 0.0
                )
            except (OSError, httpx.HTTPError) as error:
                failure = f"the server does not answer: {_reason(error)}"
            except ValueError as error:
                failure = f"the server's answer is not JSON: {error}"
            if attempt < self.max_retries and stopping.wait(waiting_s):
                break
        raise RequestFailed(failure)

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "model": self.model,
            "prompt": prompt.token_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,  # -1 means all tokens in both engines
            "seed": prompt.seed,
            # Servers take defaults from the target's generation_config.json, so set every sampling parameter. Penalties
            # affect greedy decoding too.
            **{"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _parse(self, content: Any) -> Response:
        """Parse a completion. A server that does not know `return_token_ids` returns only text."""
        try:
            [choice] = content["choices"]
            reason, token_ids, text = choice["finish_reason"], choice.get("token_ids"), choice["text"]
            if not isinstance(text, str) or not all(type(token) is int for token in token_ids or []):
                raise TypeError("text must be a string and token_ids integers")
            if not all(0 <= token < self._vocab_size for token in token_ids or []):
                raise ValueError(f"token_ids must be in [0, {self._vocab_size})")
            text.encode()  # the tokenizer rejects a lone surrogate
            num_tokens = len(token_ids) if token_ids is not None else content["usage"]["completion_tokens"]
            if type(num_tokens) is not int or not 0 <= num_tokens <= self._sampling.max_new_tokens:
                raise ValueError(
                    f"the number of tokens must be in [0, {self._sampling.max_new_tokens}], but is {num_tokens}"
                )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            shown = json.dumps(content)[:SHOWN_CHARACTERS]
            raise RequestFailed(
                f"the server's answer is not a completion ({type(error).__name__}: {error}): {shown}"
            ) from error
        if reason not in ("stop", "length"):
            raise RequestFailed(f"the server ended the response with finish_reason {reason!r}")
        stop_token_id = None
        if token_ids and reason == "stop" and token_ids[-1] in self._sampling.stop_token_ids:
            token_ids, stop_token_id = token_ids[:-1], token_ids[-1]
        return Response(num_tokens, reason == "length", token_ids, stop_token_id, text)

    def _models(self) -> dict[str, int | None]:
        """Returns the context length of each model by name; None if the server does not report it."""
        content = self._fetch_checked("/models")
        try:
            lengths = {model["id"]: model.get("max_model_len") for model in content["data"]}
            for name, length in lengths.items():
                if not isinstance(name, str) or not (length is None or (type(length) is int and length > 0)):
                    raise TypeError("id must be a string and max_model_len a positive integer")
            return lengths
        except (KeyError, TypeError) as error:
            raise ValueError(
                "responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, "
                f"but {self.url}/models answers {json.dumps(content)[:SHOWN_CHARACTERS]}; correct the address"
            ) from error

    def _choose_model(self, model: str | None, served: list[str]) -> str:
        if model is None and len(served) == 1:
            return served[0]
        if model is None:
            raise ValueError(
                f"responses.model: must be set unless the server has exactly one model, but {self.url} serves "
                f"{', '.join(served) or 'none'}; set it to the target's name on the server"
            )
        if model not in served:
            raise ValueError(
                f"responses.model: must be one of the models that {self.url} serves ({', '.join(served)}), but is "
                f"{model}; correct it or start the server with that model"
            )
        return model

    def _version(self) -> str | None:
        """Returns the engine's name and version, which vLLM reports at /version and SGLang at /server_info."""
        root = self.url.removesuffix("/v1")
        for engine, path in (("vLLM", "/version"), ("SGLang", "/server_info")):
            try:
                content = self._fetch(path, root=root)
            except (OSError, httpx.HTTPError, ValueError, RequestFailed):
                continue
            if isinstance(content, dict) and "version" in content:
                return f"{engine} {content['version']}"
        return None

    def _fetch_checked(self, path: str, request: dict[str, Any] | None = None) -> Any:
        """Fetch without retries, for checks at the start. Errors name the setting to correct."""
        try:
            return self._fetch(path, request)
        except httpx.HTTPStatusError as error:
            is_key_wrong = error.response.status_code in (401, 403)
            key = "; set the environment variable that responses.api_key_variable names" if is_key_wrong else ""
            raise ValueError(
                "responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, "
                f"but at {self.url}{path} {error}{key or '; correct the address or serve the target there'}"
            ) from error
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(
                f"responses.url: must be a running server, but {self.url}{path} does not answer ({_reason(error)}); "
                "start it or correct the address"
            ) from error
        except (ValueError, RequestFailed) as error:
            raise ValueError(
                f"responses.url: must be an OpenAI-compatible server, but the answer of {self.url}{path} cannot be "
                f"read as JSON ({error}); correct the address"
            ) from error

    def _fetch(self, path: str, request: dict[str, Any] | None = None, root: str | None = None) -> Any:
        url = (root or self.url) + path
        try:
            return parse_json(asyncio.run(self._fetch_body(url, request)), url)
        except ExceptionGroup as group:  # a port out of range, in `url` or in the target of a redirect
            raise httpx.ConnectError(str(group.exceptions[0])) from group

    async def _fetch_body(self, url: str, request: dict[str, Any] | None) -> bytes:
        """GET `url`, or POST `request` to it, and return the body.

        httpx applies its own timeout to each read separately; `asyncio.timeout` limits the whole exchange.

        Raises:
            TimeoutError: the exchange takes longer than `timeout_s`, from connecting to the last byte.
            httpx.HTTPStatusError: the status is an error; the message quotes the body.
            httpx.HTTPError: the connection failed.
            RequestFailed: the body is too long.
        """
        method, data = ("GET", None) if request is None else ("POST", json.dumps(request).encode())
        async with (
            asyncio.timeout(self._timeout_s),
            httpx.AsyncClient(
                headers=self._headers, verify=self._ssl_context, timeout=None, follow_redirects=True
            ) as client,
            client.stream(method, url, content=data) as response,
        ):
            if not response.is_success:
                message = (
                    f"the server answers {response.status_code}: "
                    f"{await _error_text(response) or response.reason_phrase}"
                )
                raise httpx.HTTPStatusError(message, request=response.request, response=response)
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RequestFailed(f"the server's answer is longer than {MAX_BODY_BYTES:,} bytes")
            return bytes(body)


async def _error_text(response: httpx.Response) -> str:
    """Returns the beginning of an error's body, or as much of it as arrives before the connection breaks."""
    body = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > 4 * SHOWN_CHARACTERS:  # a character has at most four bytes
                break
    except httpx.HTTPError:  # the connection broke off
        pass
    return body.decode(errors="replace").strip()[:SHOWN_CHARACTERS]


def _reason(error: Exception) -> str:
    return "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def regenerate_with_server(
    server: CompletionServer,
    dialogues: Iterator[Dialogue],
    concurrency: int,
    save: Callable[[RegeneratedConversation], None],
) -> Generator[RegeneratedConversation | tuple[int, str]]:
    """Regenerate conversations, at most `concurrency` at once, and yield each as soon as it ends.

    For a failed conversation, its row and the reason are yielded instead. If the caller stops early, no new requests
    are sent, and conversations that the running requests complete are passed to `save`.
    """
    tokenizing, stopping = Lock(), Event()  # only one thread at a time may use a fast tokenizer

    def converse(dialogue: Dialogue) -> RegeneratedConversation | None:
        with tokenizing:
            prompt = dialogue.next_prompt()
        while prompt is not None:
            if stopping.is_set():
                return None
            response = server.complete(prompt, stopping)
            with tokenizing:
                dialogue.add_response(response)
                prompt = dialogue.next_prompt()
        return dialogue.regenerated

    def outcome_of(dialogue: Dialogue) -> RegeneratedConversation | tuple[int, str] | None:
        try:
            return converse(dialogue)
        except (RequestFailed, EndlessTemplate) as failure:
            return dialogue.regenerated.row, str(failure)

    running: set[Future[RegeneratedConversation | tuple[int, str] | None]] = set()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                running |= {
                    pool.submit(outcome_of, dialogue) for dialogue in islice(dialogues, concurrency - len(running))
                }
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(future)
                    outcome = future.result()
                    assert outcome is not None
                    yield outcome
        finally:
            stopping.set()
            for future in wait(running).done:
                if future.exception() is None and isinstance(outcome := future.result(), RegeneratedConversation):
                    save(outcome)
