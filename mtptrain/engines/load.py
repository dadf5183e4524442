"""Sends requests to a server with a number of them in flight, and measures when the steps of each answer arrive."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from typing import Any

import httpx
from tqdm import tqdm

from mtptrain.engines.requests import Answer, Load, LoadResult, Requests
from mtptrain.engines.server import UNREADABLE, EngineServer, shown
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json
from mtptrain.utils.masking import address_below

LAST_LINE = b"data: [DONE]"


def send_all(server: EngineServer, requests: Requests, loads: Sequence[Load]) -> tuple[str, list[LoadResult]]:
    return server.version, [send(server, requests, load) for load in loads]


def send(server: EngineServer, requests: Requests, load: Load) -> LoadResult:
    """Returns the times of all answers to a load, and how much the server's drafting counters grew."""
    before, client = server.counters(), server.client(load.concurrency)
    pool = ThreadPoolExecutor(load.concurrency)
    try:
        start = time.perf_counter()
        jobs = [pool.submit(_ask, server, client, requests, index) for index in range(load.num_requests)]
        for job in tqdm(as_completed(jobs), desc=load.name.replace("_", " "), total=load.num_requests, unit="request"):
            job.result()  # raises its error
        duration_s = time.perf_counter() - start
    except (httpx.HTTPError, *UNREADABLE) as error:
        raise UserError(
            f"{server.place}: the server must answer every request, but one failed at concurrency {load.concurrency}: "
            f"{error}; see the server's log"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, none of the others is worth waiting for
    client.close()  # not after an error: a thread that still reads could then wait for the whole timeout
    answers = [job.result() for job in jobs]
    return LoadResult(answers, duration_s, server.counts_since(before, load.num_requests))


def _ask(server: EngineServer, client: httpx.Client, requests: Requests, index: int) -> Answer:
    path, content = server.streamed_request(requests.prompts[index % len(requests.prompts)], requests, index)
    steps_s, num_tokens, step = [], 0, None
    start = time.perf_counter()
    with client.stream("POST", address_below(server.url, path), json=content) as response:
        if response.is_error:
            raise ValueError(f"{response.status_code}: {shown(response.read())}")
        for message in _messages(response):
            now = time.perf_counter() - start
            if "error" in message:
                raise ValueError(str(message["error"]))
            of_message, added = server.step_of(message)
            if of_message is not None and of_message != step:
                step = of_message
                steps_s.append(now)
            num_tokens += added
    return Answer(steps_s or [time.perf_counter() - start], num_tokens)


def _messages(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the messages of a stream. `iter_lines` would also split them at U+2028, which JSON allows in a text."""
    rest = b""
    for chunk in chain(response.iter_bytes(), [b"\n"]):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != LAST_LINE:
                yield parse_json(line.removeprefix(b"data: "), "message")
