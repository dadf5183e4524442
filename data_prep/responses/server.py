"""The target behind an OpenAI-compatible server (vLLM, SGLang), asked for completions of token ids."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from itertools import islice
from threading import Event, Lock
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from .dialogue import Answer, AnsweredConversation, Dialogue, Prompt, Sampling

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
SHOWN_CHARACTERS = 200
"""Of a server's own message."""


class RequestFailed(Exception):
    """A conversation that is left out of this run; the message is the reason that the report counts."""


class AnswerServer:
    """A running server, checked before the long work."""

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
            ConnectionError: nothing answers there.
            ValueError: what answers is no such server, wants another key, or does not serve that model.
        """
        self.url = url.rstrip("/")
        self.max_retries = max_retries
        self._timeout_s = timeout_s
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        served = self._models()
        self.model = self._choose(model, list(served))
        self.context_tokens: int | None = served[self.model].get("max_model_len")
        """Of prompt and answer; None where the server does not tell."""
        self.version = self._version()

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Ask for one token.

        Raises:
            ConnectionError: the server does not answer.
            ValueError: it does not complete prompts of token ids, or counts another number of tokens in the prompt.
        """
        answer = self._ask_first("/completions", self._request(Prompt(list(prompt_ids), 0)) | {"max_tokens": 1})
        try:
            self._answer(answer)
        except RequestFailed as failure:
            raise ValueError(
                f"responses.url: {self.url} must complete prompts of token ids, but {failure}; serve the target"
            ) from None
        num_read = (answer.get("usage") or {}).get("prompt_tokens", len(prompt_ids))
        if num_read != len(prompt_ids):
            raise ValueError(
                f"responses.url: {self.url} must read a prompt of {len(prompt_ids)} token ids as it is, but counts {num_read} tokens; "
                "use a server that adds none"
            )

    def complete(self, prompt: Prompt, stopping: Event) -> Answer:
        """The answer to a prompt, asked for again while the server is busy or away and the run is not `stopping`.

        Raises:
            RequestFailed: it refused, or went on failing.
        """
        for attempt in range(self.max_retries + 1):
            waiting_s = min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
            try:
                return self._answer(self._fetch("/completions", self._request(prompt)))
            except HTTPError as error:
                failure, asked_s = _told(error), error.headers.get("Retry-After", "")
                if error.code != 429 and error.code < 500:
                    break
                waiting_s = max(waiting_s, min(float(asked_s), self._timeout_s) if asked_s.isdecimal() else 0.0)
            except (OSError, HTTPException) as error:
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
            "top_k": sampling.top_k or -1,  # what both engines take for all
            "seed": prompt.seed,
            # What is left out here comes from the target's generation_config.json, and penalties change greedy answers too.
            **{"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _answer(self, content: Any) -> Answer:
        """Read a completion; a server that knows nothing of `return_token_ids` gives text alone."""
        try:
            [choice] = content["choices"]
            reason, token_ids, text = choice["finish_reason"], choice.get("token_ids"), choice["text"]
            if not isinstance(text, str) or not all(type(token) is int for token in token_ids or []):
                raise TypeError("text must be a string, token_ids integers")
            if not all(0 <= token < self._vocab_size for token in token_ids or []):
                raise ValueError(f"token_ids must be in [0, {self._vocab_size})")
            text.encode()  # a lone surrogate would stop the tokenizer
            num_tokens = len(token_ids) if token_ids is not None else int(content["usage"]["completion_tokens"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(content)[:SHOWN_CHARACTERS]
            raise RequestFailed(f"the server's answer is no completion ({type(error).__name__}: {error}): {shown}") from error
        if reason not in ("stop", "length"):
            raise RequestFailed(f"the server ended an answer for the reason {reason!r}")
        stop_token_id = None
        if token_ids and reason == "stop" and token_ids[-1] in self._sampling.stop_token_ids:
            token_ids, stop_token_id = token_ids[:-1], token_ids[-1]
        return Answer(num_tokens, reason == "length", token_ids, stop_token_id, text)

    def _models(self) -> dict[str, dict[str, Any]]:
        content = self._ask_first("/models")
        try:
            return {model["id"]: model for model in content["data"]}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, but {self.url}"
                f"/models answers {json.dumps(content)[:SHOWN_CHARACTERS]}; correct the address"
            ) from error

    def _choose(self, model: str | None, served: list[str]) -> str:
        if model is None and len(served) == 1:
            return served[0]
        if model is None:
            raise ValueError(
                f"responses.model: must be given where a server serves not one model, but {self.url} serves "
                f"{', '.join(served) or 'none'}; give the target's name there"
            )
        if model not in served:
            raise ValueError(
                f"responses.model: must be one that {self.url} serves, {', '.join(served)}, but is {model}; correct it or start the "
                "server with it"
            )
        return model

    def _version(self) -> str | None:
        """What the server says of itself: vLLM at /version, SGLang at /server_info."""
        root = self.url.removesuffix("/v1")
        for engine, path in (("vLLM", "/version"), ("SGLang", "/server_info")):
            try:
                content = self._fetch(path, root=root)
            except (OSError, HTTPException, ValueError):
                continue
            if isinstance(content, dict) and "version" in content:
                return f"{engine} {content['version']}"
        return None

    def _ask_first(self, path: str, request: dict[str, Any] | None = None) -> Any:
        """A request of the check, whose failure is the address's."""
        try:
            return self._fetch(path, request)
        except HTTPError as error:
            key = "; set the environment variable responses.api_key_variable" if error.code in (401, 403) else ""
            raise ValueError(
                f"responses.url: must be the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, but at {self.url}"
                f"{path} {_told(error)}{key or '; correct the address or serve the target'}"
            ) from error
        except (OSError, HTTPException) as error:
            raise ConnectionError(
                f"responses.url: must be a running server, but {self.url}{path} does not answer ({_reason(error)}); start it or correct "
                "the address"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"responses.url: must be an OpenAI-compatible server, but {self.url}{path} answers no JSON ({error}); correct the address"
            ) from error

    def _fetch(self, path: str, request: dict[str, Any] | None = None, root: str | None = None) -> Any:
        data = None if request is None else json.dumps(request).encode()
        with urlopen(Request((root or self.url) + path, data, self._headers), timeout=self._timeout_s) as response:
            return json.loads(response.read())


def _told(error: HTTPError) -> str:
    try:
        body = error.read().decode(errors="replace").strip()
    except (OSError, HTTPException):  # it broke off
        body = ""
    return f"the server answers {error.code}: {body[:SHOWN_CHARACTERS] or error.reason}"


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return "timed out" if isinstance(reason, TimeoutError) else str(reason) or type(reason).__name__


def answer_with_server(
    server: AnswerServer, dialogues: Iterator[Dialogue], concurrency: int, save: Callable[[AnsweredConversation], None]
) -> Generator[AnsweredConversation | tuple[int, str]]:
    """Answer conversations, at most `concurrency` at once, in the order in which they end; of one that failed, its row and why.

    When the run stops early, no further request is made, and `save` takes what ends with those on their way.
    """
    tokenizing, stopping = Lock(), Event()  # a fast tokenizer is not to be shared by threads

    def converse(dialogue: Dialogue) -> AnsweredConversation | tuple[int, str] | None:
        with tokenizing:
            prompt = dialogue.next_prompt()
        while prompt is not None:
            if stopping.is_set():
                return None
            try:
                answer = server.complete(prompt, stopping)
            except RequestFailed as failure:
                return dialogue.answered.row, str(failure)
            with tokenizing:
                dialogue.take(answer)
                prompt = dialogue.next_prompt()
        return dialogue.answered

    running: set[Future[AnsweredConversation | tuple[int, str] | None]] = set()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                running |= {pool.submit(converse, dialogue) for dialogue in islice(dialogues, concurrency - len(running))}
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
                if future.exception() is None and isinstance(outcome := future.result(), AnsweredConversation):
                    save(outcome)
