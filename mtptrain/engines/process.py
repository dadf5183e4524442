"""Starts engines: a server in its own process group until it answers, or a worker in the engine's Python environment.

Both run below `supervisor.py`, so that none outlives this process.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from mtptrain.engines.server import EngineServer
from mtptrain.utils.distributed import free_port
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import write_text
from mtptrain.utils.startup import without_own_settings

SHOWN_LINES = 30
"""Number of output lines that the error of a failed process shows."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")
CHECKOUT = Path(__file__).parents[2]
"""The folder into which `make` installs engines."""

START_TIMEOUT_S = 3600.0
"""Seconds that a server may take to load the target and answer. One that fails ends sooner, which is noticed."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that a server may take to shut down before its process group is killed."""
ENDING_S = 2.0
"""Seconds to see whether a server that does not answer has ended."""
POLL_S = 0.2
Server = TypeVar("Server", bound=EngineServer)


def warn_of_version(name: str, tested: str, version: str, place: str, more: str = "") -> None:
    """Warn that an engine, which users know by this name, has not the version that exports are written for."""
    warn(
        f"{place}: {name} should be {tested}, the only version that mtptrain was tested with, but is {version}; "
        f"another version may read exports differently{more}"
    )


def made_python(engine: str) -> Path:
    """Returns the Python of the environment that `make` installs into a folder of the checkout, named after the engine.

    It need not exist.
    """
    return CHECKOUT / f".venv-{engine}" / "bin" / "python"


def find_python(given: str | None, engine: str, name: str, packages: str, code: str) -> tuple[Path, str]:
    """Returns the Python of an engine's own environment, and the version that the code prints there.

    `given` is `serving.program`; None takes `made_python`. The code fails without the engine.
    """
    path = made_python(engine) if given is None else Path(given)
    version = printed_by(path, code) if path.is_file() else None
    if version is None:
        does = "has none" if path.is_file() else "does not exist"
        raise UserError(
            f"serving.program: must be a Python with {name}, but {path} {does}; run `make .venv-{engine}/.installed` "
            f"in a checkout, or install {packages} into an environment of its own and set serving.engine={engine} "
            "serving.program=ITS_PYTHON"
        )
    return path, version


def printed_by(python: Path, code: str) -> str | None:
    """Returns what code prints in an engine's Python, without packages of the working directory; None if it fails."""
    command = [str(python), "-c", f"import sys; sys.path = [each for each in sys.path if each]\n{code}"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True)
    return None if result.returncode else result.stdout.strip()


def run_worker(python: Path, worker: Path, mode: str, job: object, name: str) -> Any:
    """Returns what the worker writes for a job, both as JSON. One that crashes is started once more.

    Its arguments are the mode, and the files of the job and of the result. Lines that begin with its name and a colon
    are shown. After a failure, the last `SHOWN_LINES` lines are part of the error.
    """
    with tempfile.TemporaryDirectory(prefix="mtptrain-job-") as directory:
        job_path, result_path = (Path(directory) / file for file in ("job.json", "result.json"))
        write_text(job_path, json.dumps(job))
        command = [str(part) for part in (sys.executable, SUPERVISOR, python, worker, mode, job_path, result_path)]
        status, lines = _ended(command, f"{worker.stem}:")
        if status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):  # a fault in the engine's own code
            warn(f"{name} crashed with status {status}, and is started once more; its last lines:\n{lines}")
            status, lines = _ended(command, f"{worker.stem}:")
        if status or not result_path.is_file():
            raise UserError(
                f"{name}: the worker must end with a result, but ended with status {status}; its last lines:\n{lines}"
            )
        return json.loads(result_path.read_text())


def _ended(command: list[str], progress: str) -> tuple[int, str]:
    """Returns the status and the last lines of a program that has ended. Lines that begin with `progress` are shown."""
    lines: deque[str] = deque(maxlen=SHOWN_LINES)
    with subprocess.Popen(
        command,
        env=without_own_settings(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith(progress):
                    sys.stderr.write(line.removeprefix(progress).lstrip())
                    sys.stderr.flush()
        except BaseException:  # such as Ctrl-C: end the program and those that it has started
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, "".join(lines).rstrip()


@dataclass
class Started:
    """A server that was started at an address of this machine, and may not answer yet."""

    url: str
    name: str
    process: subprocess.Popen[bytes]
    has_answered: bool = False

    def wait(self) -> None:
        """Wait until the server answers. Raises UserError if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                self.has_answered = httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success
            self.check()
            if self.has_answered:
                return
            time.sleep(POLL_S)
        raise UserError(f"{self.name}: must answer within {START_TIMEOUT_S:g} s, but does not; read its log")

    def check(self) -> None:
        """Raises UserError if the server has ended."""
        if self.process.poll() is not None:
            raise UserError(f"{self.name}: must run, but has ended")


@contextmanager
def started_server(
    kind: type[Server], command: Sequence[Path | str], log_path: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Runs a server, which ends no later than this process, and yields it once it answers."""
    with started(kind.program, command, log_path, environment) as server:
        server.wait()
        yield kind(server.url, log_path)


@contextmanager
def started(
    program: str,
    command: Sequence[Path | str],
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    devices: str = "",
    host: str = "127.0.0.1",
) -> Iterator[Started]:
    """Runs a server, which ends no later than this process, on all GPUs or on these, as CUDA_VISIBLE_DEVICES. With the
    host 0.0.0.0, other machines reach it too."""
    port = free_port()
    arguments = [sys.executable, SUPERVISOR, *command, "--host", host, "--port", str(port)]
    seen = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            env=dict(environment or {}) | without_own_settings(os.environ) | seen,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Started(f"http://127.0.0.1:{port}", f"{program}, whose log is {log_path}", process)
    try:
        yield server
    except UserError as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)  # a server that has ended could not answer
        if process.poll() is None:
            raise
        does = "must run until all prompts are answered" if server.has_answered else "must start"
        raise UserError(
            f"{program}: {does}, but ended with status {process.returncode}; its log is {log_path}, and its last "
            "lines are:\n" + "\n".join(log_path.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        ) from error
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill what is left of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SHUTDOWN_TIMEOUT_S)
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
