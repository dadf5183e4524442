"""Starts an engine's server in its own process group, waits until it answers, and ends the whole group."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import httpx

from mtptrain.serving.engine_server import START, EngineServer
from mtptrain.utils.distributed import free_port
from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import without_own_settings

BENCH_WORKER = Path(__file__).with_name("bench_worker.py")
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that a server may take to shut down before its process group is killed."""
ENDING_S = 2.0
"""Seconds to see whether a server that does not answer has ended."""
POLL_S = 0.2
SHOWN_LINES = 30
"""Number of log lines that the error of a failed process shows."""
Server = TypeVar("Server", bound=EngineServer)
DEFAULT_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU the engine would pin its threads to cores, which a container may forbid.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of every server and load generator. Values that the user has set take precedence."""


class EngineCrashed(UserError):
    """The process of an engine was ended by a fault in the engine's own code."""


def ended_with(status: int, message: str) -> UserError:
    """Returns the error of a process that has ended with this status, which is negative after a signal."""
    crashed = status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
    return (EngineCrashed if crashed else UserError)(message)


class WorkerProcess:
    """A worker in its own process group, which ends once its stdin is closed: no later than this process."""

    def __init__(self, command: Sequence[Path | str], log_path: Path, stdout: int | None = None) -> None:
        """Start the process. Its output goes to the log, except for stdout if `stdout` is given."""
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=DEFAULT_ENVIRONMENT | without_own_settings(os.environ) | {"no_proxy": _addresses_without_proxy()},
                stdin=subprocess.PIPE,
                stdout=log if stdout is None else stdout,
                stderr=log if stdout is not None else subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def end(self) -> None:
        """Ask the process to end, and kill what is left of its group."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SHUTDOWN_TIMEOUT_S)
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, name: str, requirement: str) -> UserError:
        """Returns the error of a process that has ended by itself, which shows the end of its log."""
        status = self.process.wait()
        return ended_with(
            status,
            f"{name}: {requirement}, but ended with status {status}; its log is {self.log_path}, and its last lines "
            f"are:\n{self.last_lines()}",
        )

    def last_lines(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


class ManagedServer(Generic[Server]):
    """The process of a server. The context manager starts it, waits until it answers, and ends it."""

    def __init__(
        self,
        python: Path | str,
        arguments: Sequence[str],
        log_path: Path,
        timeout_s: float,
        connect: Callable[[str], Server],
        name: str,
    ) -> None:
        """Store the settings. Only entering the context manager starts the server.

        Args:
            python: the interpreter of `bench_worker.py`: for vLLM one that has it.
            arguments: arguments of `bench_worker.py`, to which host and port are added.
            log_path: the file for everything that the server prints.
            timeout_s: seconds that the server may take to start.
            connect: takes the address of the server that answers.
            name: the server's command, for error messages.
        """
        self._python, self._arguments = python, arguments
        self._log_path, self._timeout_s = log_path, timeout_s
        self._connect, self._name = connect, name

    def __enter__(self) -> Server:
        """Returns the server once it answers.

        Raises:
            UserError: the server ended, or did not answer in time.
        """
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [self._python, BENCH_WORKER, *self._arguments, *address]
        self._worker = WorkerProcess(command, self._log_path)
        try:
            self._wait()
        except BaseException:
            self._worker.end()
            raise
        try:
            return self._connect(self._url)
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """End the server after an error, or None.

        Raises:
            UserError: it had ended by itself, so that it could not answer, or the error is about its answers: users
                know it by its name and its log, not by the address that it has here, and cannot start it.
        """
        process = self._worker.process
        if isinstance(error, UserError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
        has_ended = process.poll() is not None
        self._worker.end()
        if not isinstance(error, UserError):
            return
        if has_ended:
            raise self._worker.ended(self._name, "must run until all prompts are answered") from error
        message = str(error).removeprefix("serving.url: ").removeprefix(f"{self._url}: ")
        if message != str(error):
            message = re.sub(START, "read its log", message)
            raise UserError(f"{self._name}, whose log is {self._log_path}: {message}") from error

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not _answers(f"{self._url}/health"):
            if self._worker.process.poll() is not None:
                raise self._worker.ended(self._name, "must start")
            if time.monotonic() > deadline:
                raise UserError(
                    f"serving_bench.start_timeout_s: the server must answer within {self._timeout_s:g} s, but does "
                    f"not; read {self._log_path}, or raise the timeout"
                )
            time.sleep(POLL_S)


def _addresses_without_proxy() -> str:
    """Returns the user's `no_proxy` and this machine: load generators must not ask a proxy for our server."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return given if given == "*" else f"{given},127.0.0.1,localhost"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False
