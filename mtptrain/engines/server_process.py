"""Starts an engine's server in its own process group, waits until it answers, and ends the whole group."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx

from mtptrain.engines.server import EngineServer
from mtptrain.engines.worker import SHOWN_LINES, SUPERVISOR
from mtptrain.utils.distributed import free_port
from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import without_own_settings

START_TIMEOUT_S = 3600.0
"""Seconds that a server may take to load the target and answer. One that fails ends sooner, which is noticed."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that a server may take to shut down before its process group is killed."""
ENDING_S = 2.0
"""Seconds to see whether a server that does not answer has ended."""
POLL_S = 0.2
Server = TypeVar("Server", bound=EngineServer)


@contextmanager
def started_server(
    kind: type[Server],
    command: Sequence[Path | str],
    log_path: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Runs a server, which ends no later than this process, and yields it once it answers.

    Args:
        kind: the class of the server's client.
        command: the program and its arguments, to which host and port are added.
        log_path: the file for everything that the server prints.
        environment: variables to set unless the user has set them.

    Raises:
        UserError: the server ended, or did not answer in time.
    """
    port = free_port()
    arguments = [sys.executable, SUPERVISOR, *command, "--host", "127.0.0.1", "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            env=dict(environment or {}) | without_own_settings(os.environ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, does = f"http://127.0.0.1:{port}", "must start"
    try:
        _wait(f"{url}/health", process, f"{kind.program}, whose log is {log_path}")
        does = "must run until all prompts are answered"
        yield kind(url, log_path)
    except UserError as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)  # a server that has ended could not answer
        if process.poll() is None:
            raise
        raise UserError(
            f"{kind.program}: {does}, but ended with status {process.returncode}; its log is {log_path}, and its last "
            "lines are:\n" + "\n".join(log_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        ) from error
    finally:
        _end(process)


def _wait(url: str, process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until a server answers. Raises UserError if it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None:
            raise UserError(f"{name}: must start, but has ended")
        if time.monotonic() > deadline:
            raise UserError(f"{name}: must answer within {START_TIMEOUT_S:g} s, but does not; read its log")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill what is left of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SHUTDOWN_TIMEOUT_S)
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False
