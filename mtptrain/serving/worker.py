"""Runs a job by a program in an engine's own Python environment, and reads its result."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtptrain.serving.server_process import SHOWN_LINES
from mtptrain.utils.errors import UserError


def run_worker(python: Path, worker: Path, arguments: Sequence[str], job: object, name: str) -> Any:
    """Returns what the worker writes for a job, both as JSON.

    Lines that begin with the worker's name and a colon are shown. All others are printed only after a failure.

    Args:
        python: the interpreter.
        worker: the program. Its last two arguments are the files of the job and of the result.
        arguments: the worker's arguments before these files.
        job: the contents of the job's file.
        name: the engine, for errors.

    Raises:
        UserError: the worker failed.
    """
    progress = f"{worker.stem}:"
    with tempfile.TemporaryDirectory(prefix="mtptrain-job-") as directory:
        job_path, result_path = (Path(directory) / file for file in ("job.json", "result.json"))
        job_path.write_text(json.dumps(job))
        command = [str(part) for part in (python, worker, *arguments, job_path, result_path)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            lines = []
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
            raise UserError(
                f"{name}: the worker must end with a result, but ended with status {process.returncode}; its last "
                "lines:\n" + "".join(lines[-SHOWN_LINES:])
            )
        return json.loads(result_path.read_text())
