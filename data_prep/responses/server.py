"""Regenerates conversations on a running OpenAI-compatible server (vLLM, SGLang). Prompts are sent as token ids."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Event, Lock
from typing import Any

import httpx

from mtptrain.serving.engine import NEUTRAL_SAMPLING
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import address_below

from .dialogue import Dialogue, Prompt, RegeneratedConversation, Response, Sampling
from .transport import RequestFailed, Transport

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


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
            UserError: no server responds, or the server is not OpenAI-compatible, rejects the API key, does not serve
                `model`, or, if `model` is None, does not serve exactly one model; or the address has a password that is
                not percent-encoded.
        """
        self._transport = Transport(url, timeout_s, api_key)
        self.url = self._transport.url
        """The address as messages show it, without a password."""
        self.quote = self._transport.quote
        self.max_retries = max_retries
        self._timeout_s = timeout_s
        self._sampling = sampling
        self._vocab_size = vocab_size
        served = self._models()
        self.model = self._choose_model(model, list(served))
        self.context_tokens = served[self.model]
        """Maximum tokens of prompt plus response; None if the server does not report it."""
        self.version = self._version()

    def check(self, prompt_ids: Sequence[int]) -> Response:
        """Check that the server completes prompts given as token ids, by requesting one token, which is returned.

        Raises:
            UserError: the server does not respond, or the server does not complete such prompts, or counts more or
                fewer prompt tokens than were sent.
        """
        content = self._fetch_checked("/completions", self._request(Prompt(list(prompt_ids), 0)) | {"max_tokens": 1})
        try:
            response = self._parse(content)
        except RequestFailed as failure:
            raise UserError(
                f"responses.url: {self.url} must complete prompts given as token ids, but {failure}; serve the target "
                "there"
            ) from None
        usage = content.get("usage")
        num_read = usage.get("prompt_tokens", len(prompt_ids)) if isinstance(usage, dict) else len(prompt_ids)
        if num_read != len(prompt_ids):
            raise UserError(
                f"responses.url: {self.url} must read a prompt of {len(prompt_ids)} token ids unchanged, but counts "
                f"{self.quote(repr(num_read))} tokens; use a server that does not change prompts"
            )
        return response

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
                return self._parse(self._transport.fetch("/completions", self._request(prompt)))
            except httpx.HTTPStatusError as error:
                failure, retry_after_s = str(error), error.response.headers.get("Retry-After", "")
                if error.response.status_code != 429 and error.response.status_code < 500:
                    break
                waiting_s = max(
                    waiting_s, min(float(retry_after_s), self._timeout_s) if retry_after_s.isdecimal() else 0.0
                )
            except (OSError, httpx.HTTPError) as error:
                failure = f"the server does not answer: {self._transport.reason(error)}"
            except ValueError as error:
                failure = str(error)
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
            **NEUTRAL_SAMPLING,
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
        except (KeyError, TypeError, ValueError) as error:
            raise RequestFailed(
                f"the server's answer is not a completion ({type(error).__name__}: {self.quote(str(error))}): "
                f"{self.quote(json.dumps(content))}"
            ) from error
        if reason not in ("stop", "length"):
            raise RequestFailed(f"the server ended the response with finish_reason {self.quote(repr(reason))}")
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
                is_name = isinstance(name, str) and name.isprintable()
                if not is_name or not (length is None or (type(length) is int and length > 0)):
                    raise TypeError("id must be a printable string and max_model_len a positive integer")
            return lengths
        except (KeyError, TypeError) as error:
            raise UserError(
                "responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, "
                f"but {address_below(self.url, '/models')} answers "
                f"{self.quote(json.dumps(content))}; correct the address"
            ) from error

    def _choose_model(self, model: str | None, served: list[str]) -> str:
        if model is None and len(served) == 1:
            return served[0]
        names = self.quote(", ".join(served)) or "none"
        if model is None:
            raise UserError(
                f"responses.model: must be set unless the server has exactly one model, but {self.url} serves {names}; "
                "set it to the target's name on the server"
            )
        if model not in served:
            raise UserError(
                f"responses.model: must be one of the models that {self.url} serves ({names}), but is {model}; correct "
                "it or start the server with that model"
            )
        return model

    def _version(self) -> str | None:
        """Returns the engine's name and version, which vLLM reports at /version and SGLang at /server_info."""
        for engine, path in (("vLLM", "/version"), ("SGLang", "/server_info")):
            try:
                content = self._transport.fetch(path, is_beside=True)
            except (OSError, httpx.HTTPError, ValueError, RequestFailed):
                continue
            if isinstance(content, dict) and "version" in content:
                return f"{engine} {self.quote(str(content['version']))}"
        return None

    def _fetch_checked(self, path: str, request: dict[str, Any] | None = None) -> Any:
        """Fetch without retries, for checks at the start. Errors name the setting to correct."""
        where = address_below(self.url, path)
        try:
            return self._transport.fetch(path, request)
        except httpx.HTTPStatusError as error:
            is_key_wrong = error.response.status_code in (401, 403)
            key = "; set the environment variable that responses.api_key_variable names" if is_key_wrong else ""
            raise UserError(
                "responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, "
                f"but at {where} {error}{key or '; correct the address or serve the target there'}"
            ) from error
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"responses.url: must be a running server, but {where} does not answer "
                f"({self._transport.reason(error)}); start it or correct the address"
            ) from error
        except RequestFailed as error:
            raise UserError(
                f"responses.url: must be an OpenAI-compatible server, but the answer of {where} cannot be "
                f"read ({error}); correct the address"
            ) from error


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
                if not dialogue.is_consistent(response):
                    raise RequestFailed(
                        "the server's token_ids must be those of its text, but decode to another text: "
                        f"{server.quote(response.text)}"
                    )
                dialogue.add_response(response)
                prompt = dialogue.next_prompt()
        return dialogue.regenerated

    def outcome_of(dialogue: Dialogue) -> RegeneratedConversation | tuple[int, str] | None:
        try:
            return converse(dialogue)
        except RequestFailed as failure:
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
