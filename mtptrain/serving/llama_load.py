"""Sends requests to `llama-server`, and measures them as `vllm bench serve` measures those to vLLM."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import httpx

from mtptrain.serving.engine_server import NO_PROXY, REQUEST_TIMEOUT_S
from mtptrain.serving.load_generator import Latencies, Load
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json, write_json
from mtptrain.utils.masking import address_below, hide_passwords

SAMPLING_NAMES = {"repetition_penalty": "repeat_penalty"}
"""llama.cpp's names of settings that vLLM names otherwise."""


@dataclass(frozen=True)
class _Answer:
    """The times of one request, in seconds."""

    start: float
    steps: list[float]
    """When the first message of each step arrived."""
    end: float
    num_tokens: int


def send_load(load: Load, finished: Callable[[int], None] = lambda _: None) -> Latencies:
    """Send the requests in threads and return their latencies, as `LoadGenerator.run` does.

    Writes `load.result_path` with the entries of a result of `vllm bench serve`.

    Raises:
        UserError: a request failed.
    """
    prompts = json.loads(Path(load.prompts_path).read_text())
    # The server closes the connection after each stream. A client that kept it might send the next request before
    # it notices, and that request would fail.
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=0)
    pool = ThreadPoolExecutor(load.concurrency)
    try:
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=limits, mounts=NO_PROXY) as client:
            start = time.perf_counter()
            jobs = [
                pool.submit(_ask, client, load, prompts[index % len(prompts)], load.seed + index)
                for index in range(load.num_requests)
            ]
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()  # raises its error
                finished(done)
            duration = time.perf_counter() - start
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise UserError(
            f"{hide_passwords(load.url)}: the server must answer every request, but one failed at concurrency "
            f"{load.concurrency}: {error}; see the server's log"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, none of the others is worth waiting for
    answers = [job.result() for job in jobs]
    result = {
        "completed": len(answers),
        "total_output_tokens": sum(answer.num_tokens for answer in answers),
        "duration": duration,
        "ttfts": [answer.steps[0] - answer.start for answer in answers],
        "latencies": [answer.end - answer.start for answer in answers],
        "output_lens": [answer.num_tokens for answer in answers],
        "itls": [[later - step for step, later in pairwise(answer.steps)] for answer in answers],
    }
    write_json(Path(load.result_path), result)
    return Latencies.read(Path(load.result_path))


def _ask(client: httpx.Client, load: Load, prompt: list[int], seed: int) -> _Answer:
    request = {"prompt": prompt, "n_predict": load.max_new_tokens, "ignore_eos": load.ignore_eos, "seed": seed}
    sampling = {SAMPLING_NAMES.get(name, name): value for name, value in load.sampling.items()}
    request |= sampling | {"stream": True, "cache_prompt": False, "timings_per_token": True}
    start, step, steps, num_tokens = time.perf_counter(), None, [], 0
    with client.stream("POST", address_below(load.url, "/completion"), json=request) as response:
        response.raise_for_status()
        for message in _messages(response):
            now = time.perf_counter()
            if "error" in message:
                raise ValueError(str(message["error"]))
            if message["stop"]:
                num_tokens = message["tokens_predicted"]
            # llama.cpp sends a message for each token, but reads the clock once for all tokens that a step accepts.
            elif message["timings"]["predicted_ms"] != step:
                step = message["timings"]["predicted_ms"]
                steps.append(now)
    end = time.perf_counter()
    return _Answer(start, steps or [end], end, num_tokens)


def _messages(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the messages of a stream. `iter_lines` would also split them at U+2028, which JSON allows in a text."""
    rest = b""
    for chunk in chain(response.iter_bytes(), [b"\n"]):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield parse_json(line.removeprefix(b"data: "), "message")
