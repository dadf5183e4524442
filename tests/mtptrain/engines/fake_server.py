"""A fake server with the pages and counters of vLLM's and of llama.cpp's."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="a"}} 2.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="/m/{{a}}",position="1"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="0"}} {accepted}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="a"}} {finished}.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="a"}} 0.0
"""


class FakeServer(ThreadingHTTPServer):
    """Answers with the prompt's tokens in reverse order. Every completion increases the counters."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.num_answered, self.finished_per_request = 0, 1
        self.answers: dict[str, bytes] = {}
        """Bodies to send instead of the usual ones, by path."""
        self.status = 200
        self.is_busy = False
        """Whether the counters rise with every GET request too."""
        self.requests: list[dict[str, Any]] = []

    def serves(self, root: object) -> None:
        """Say that the model at `root` is served with a context of 512 tokens."""
        models = {"data": [{"id": "a", "root": str(root), "max_model_len": 512}]}
        facts = {"build_info": "b11434-x", "model_path": str(root), "model_ftype": "all F32"}
        facts |= {"default_generation_settings": {"n_ctx": 512}, "total_slots": 4}  # type: ignore[dict-item]
        self.answers |= {"/v1/models": json.dumps(models).encode(), "/props": json.dumps(facts).encode()}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.num_answered += self.server.is_busy
        number = self.server.num_answered
        counters = {"drafts": 3 * number, "drafted": 6 * number, "accepted": 2 * number}
        texts = {
            "/v1/models": json.dumps({"data": [{"id": "a", "max_model_len": 64}]}),
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": METRICS.format(**counters, finished=number * self.server.finished_per_request),
        }
        self.reply(texts.get(self.path, ""))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_answered += 1
        self.server.requests.append(request)
        tokens = request["prompt"][::-1]
        if not request.get("stream"):
            self.reply(json.dumps({"choices": [{"token_ids": tokens}]}))
        elif self.path == "/completion":
            # llama.cpp sends a message for each token, with the same time for the three of a step.
            times = [
                {"stop": False, "content": chr(token), "timings": {"predicted_ms": index // 3}}
                for index, token in enumerate(tokens)
            ]
            self.stream([*times, {"stop": True, "tokens_predicted": len(tokens)}])
        else:
            steps = [{"choices": [{"text": chr(token)}], "usage": None} for token in tokens]
            self.stream([*steps, {"choices": [], "usage": {"completion_tokens": len(tokens)}}])

    def stream(self, messages: list[dict[str, Any]]) -> None:
        lines = [f"data: {json.dumps(message, ensure_ascii=False)}\n\n" for message in messages]
        self.reply("".join([*lines, "data: [DONE]\n\n"]))

    def reply(self, text: str) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answers.get(self.path, text.encode()))

    def log_message(self, *args: object) -> None:
        pass


Fake = TypeVar("Fake", bound=FakeServer)


@contextmanager
def fake_server(kind: Callable[[], Fake] = FakeServer) -> Iterator[Fake]:  # type: ignore[assignment]
    with kind() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
