"""Runs a job by a program in an engine's own Python environment, and reads its result."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import without_own_settings

SHOWN_LINES = 30
"""Number of output lines that the error of a failed process shows."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")
MAKEFILE = Path(__file__).parents[2] / "Makefile"
"""That of the checkout. A wheel has none."""


class EngineCrashed(UserError):
    """The process of an engine was ended by a fault in the engine's own code."""


def how_to_install(folder: str, without_makefile: str) -> str:
    """Returns what a user can do to get an engine: `make` in a checkout, and something else in a wheel.

    Args:
        folder: the folder of the checkout into which `make` installs the engine.
        without_makefile: what to do where there is no Makefile.
    """
    return f"run `make {folder}/.installed`" if MAKEFILE.is_file() else without_makefile


def printed_by(python: Path, code: str) -> str | None:
    """Returns what code prints in an engine's Python, which finds no packages in the working directory.

    Returns None if the code fails.
    """
    command = [str(python), "-c", f"import sys; sys.path = [each for each in sys.path if each]\n{code}"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True)
    return None if result.returncode else result.stdout.strip()


def run_worker(python: Path, worker: Path, mode: str, job: object, name: str) -> Any:
    """Returns what the worker writes for a job, both as JSON.

    Lines that begin with the worker's name and a colon are shown. After a failure, the last `SHOWN_LINES` lines are
    part of the error. The worker ends no later than this process.

    Args:
        python: the interpreter.
        worker: the program. Its arguments are the mode, and the files of the job and of the result.
        mode: the worker's first argument.
        job: the contents of the job's file.
        name: the engine, for errors.

    Raises:
        UserError: the worker failed; as EngineCrashed if the engine's own code did.
    """
    progress = f"{worker.stem}:"
    with tempfile.TemporaryDirectory(prefix="mtptrain-job-") as directory:
        job_path, result_path = (Path(directory) / file for file in ("job.json", "result.json"))
        job_path.write_text(json.dumps(job))
        command = [str(part) for part in (sys.executable, SUPERVISOR, python, worker, mode, job_path, result_path)]
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
            lines: deque[str] = deque(maxlen=SHOWN_LINES)
            try:
                for line in process.stdout:
                    lines.append(line)
                    if line.startswith(progress):
                        sys.stderr.write(line.removeprefix(progress).lstrip())
                        sys.stderr.flush()
            except BaseException:  # such as Ctrl-C: end the worker and the programs that it has started
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode or not result_path.is_file():
            crashed = process.returncode in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
            raise (EngineCrashed if crashed else UserError)(
                f"{name}: the worker must end with a result, but ended with status {process.returncode}; its last "
                "lines:\n" + "".join(lines),
            )
        return json.loads(result_path.read_text())
