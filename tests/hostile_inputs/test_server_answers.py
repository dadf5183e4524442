"""Tests that a hostile answer of a server fails its conversation with a stated reason."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import run_program
from tests.data_prep.speaking import fake_server
from tests.hostile_inputs.damages import CHAT, DIGITS, NESTED, RESPONSES, Place, errors


@pytest.fixture
def hostile_server() -> Iterator[Any]:
    with fake_server() as server:
        yield server


def without_end() -> Iterator[bytes]:
    while True:
        yield b" "
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "reason"),
    [([NESTED], "JSON"), ([DIGITS], "JSON"), (None, "timed out")],
    ids=["nested", "digits", "endless"],
)
def test_a_servers_hostile_answer_fails_its_conversation_by_name(
    place: Place, hostile_server: Any, body: list[bytes] | None, reason: str
) -> None:
    hostile_server.behave = lambda request: (200, without_end() if body is None else iter(body))
    (place.data / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    overrides = ["prompts.source=responses", f"prompts.paths=[{place.data}/chats.jsonl]", "responses.dtype=float32"]
    more = [
        f"responses.url={hostile_server.url}",
        "responses.max_retries=0",
        "responses.max_new_tokens=16",
        "responses.timeout_s=2",
    ]
    ran = run_program(RESPONSES, *overrides, *more, f"target.path={place.target}", f"run_dir={place.directory}/run")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    (line,) = errors(ran.stderr)
    assert re.match(r"error: \S+/responses: at least one conversation must get a response, but none did", line)
    (failure,) = (place.directory / "run/responses/failures.jsonl").read_text().splitlines()
    assert reason in failure
