"""Makes a tiny target that generates printable text, and a server with programmable responses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.conftest import GENERATION_TEMPLATE, make_target

EOS = 256
NUM_PRINTABLE = 94
"""Tokens 0..93 are the characters from `!` to `~`."""


def make_speaking_target(
    directory: Path, seed: int = 3, chat_template: str = GENERATION_TEMPLATE, **config: object
) -> Path:
    """Makes a random target that generates printable characters and sometimes the end-of-sequence token."""
    make_target(directory, seed=seed, chat_template=chat_template, **config)
    weights = load_file(directory / "model.safetensors")
    # The lm_head shares these weights, so a row of zeros gives logit 0, which is never the largest.
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[NUM_PRINTABLE:EOS] = 0
    embeddings[EOS + 1 :] = 0
    embeddings[EOS] *= 1.5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


Reply = tuple[int, Any]
"""A status and a body, which is bytes or an object to send as JSON. The body of a redirect (307) is the new address."""
Behaviour = Callable[[dict[str, Any]], Reply]


def completion(prompt: list[int], token_ids: list[int], reason: str = "stop", text: str | None = None) -> Reply:
    """Returns a completion as vLLM does with `return_token_ids`."""
    shown = "".join(chr(ord("!") + token) for token in token_ids if token in range(NUM_PRINTABLE))
    choice = {"text": shown if text is None else text, "finish_reason": reason, "token_ids": token_ids}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(token_ids)}
    return 200, {"choices": [choice], "usage": usage}


def answer_by_prompt(request: dict[str, Any]) -> Reply:
    """Returns three to nine characters that depend only on the prompt."""
    total = sum(position * token for position, token in enumerate(request["prompt"], 1))
    return completion(request["prompt"], [(total + i) % NUM_PRINTABLE for i in range(3 + total % 7)] + [EOS])


class FakeServer:
    """Defines the responses of a real HTTP server, and records completion requests except the initial check."""

    def __init__(self) -> None:
        self.url = ""
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 512}]}
        self.check: Behaviour = lambda request: completion(request["prompt"], [5], "length")
        """Answer to the request for one token, with which a run starts."""
        self.behave: Behaviour = answer_by_prompt
        self.query = ""
        """The query that the address of every request must have, or else the answer is 401."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """Headers of every request, by lower-case name."""
        self.at_once = 0
        """Highest number of concurrent requests."""
        self._in_flight = 0
        self._lock = threading.Lock()

    def reply(self, path: str, request: dict[str, Any]) -> Reply:
        if path == "/version":
            return 200, {"version": "0.0.1"}
        if path == "/v1/models":
            return 200, self.models
        if path != "/v1/completions":
            return 404, {"error": "no such page"}
        if request["max_tokens"] == 1:
            return self.check(request)
        with self._lock:
            self.requests.append(request)
            self._in_flight += 1
            self.at_once = max(self.at_once, self._in_flight)
        try:
            return self.behave(request)
        finally:
            with self._lock:
                self._in_flight -= 1


@contextmanager
def fake_server(address: str = "127.0.0.1") -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._send({})

        def _send(self, request: dict[str, Any]) -> None:
            fake.headers.append({name.lower(): value for name, value in self.headers.items()})
            path, _, query = self.path.partition("?")
            is_known = query == fake.query
            status, content = fake.reply(path, request) if is_known else (401, {"error": f"wrong key in {self.path}"})
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(body)))
                if status == 307:
                    self.send_header("Location", content)
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # the client has given up
                pass

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # a connection beyond this limit would be retried only after a second

    with Server((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        fake.url = f"http://{address}:{server.server_address[1]}/v1"
        yield fake
        server.shutdown()
