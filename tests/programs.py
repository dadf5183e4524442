"""Runs programs of the project in processes forked from one that has imported everything.

A run then takes one second instead of ten. A program gets the same arguments, environment and working directory as from
`python -m` or torchrun.
"""

import atexit
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import psutil
import torch

from mtptrain.cli.stages import STAGES
from mtptrain.utils.distributed import free_port

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "tests.cuda.guard",  # must come before torch
        *(
            "data_prep.hidden_states",
            "data_prep.prompts",
            "eval.acceptance",
            "mtptrain.train",
            "tests.warmed",
            __name__,
        ),
    ]
)


class StartedProgram:
    """A stage or a module that runs in `num_ranks` processes, one per rank."""

    def __init__(self, program: str, arguments: list[str], num_ranks: int = 1) -> None:
        module, *arguments = [*(["mtptrain"] if program in STAGES else []), program, *arguments]
        self.command = [sys.executable, "-m", module, *arguments]
        self.stdout, self.stderr = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - closed with the object
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (self.stdout, self.stderr)]
        self.processes, port = list[BaseProcess](), free_port()
        for rank in range(num_ranks):
            environment = dict(os.environ) | (ranks_environment(rank, num_ranks, port) if num_ranks > 1 else {})
            process = FORKED.Process(target=run_module, args=(module, arguments, environment, *files))
            self.processes.append(process)
            process.start()

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def errors_so_far(self) -> str:
        return read_whole(self.stderr)

    def kill(self) -> None:
        """Kill all ranks at once, if they still run."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def signal(self, number: int, rank: int = 0) -> None:
        """Send a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait for all ranks, killing the others if one fails.

        Returns:
            The first exit code that is not 0, or else 0, and the output of all ranks.

        Raises:
            subprocess.TimeoutExpired: after ten minutes.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while any(each.is_alive() for each in self.processes) and not any(each.exitcode for each in self.processes):
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(self.command, TIMEOUT_S, *map(read_whole, (self.stdout, self.stderr)))
            time.sleep(0.01)
        for process in self.processes:
            process.join(20)  # the other processes may still report their errors
        self.kill()
        code = next(filter(None, (process.exitcode for process in self.processes)), 0)
        return subprocess.CompletedProcess(self.command, code, read_whole(self.stdout), read_whole(self.stderr))


def wait_until(is_reached: Callable[[], bool], *programs: StartedProgram) -> None:
    """Wait for something that these programs must reach before they end."""
    while not is_reached():
        for program in programs:
            assert program.is_running, program.result().stderr[-3000:]
        time.sleep(0.001)


def run_ranks(program: str, arguments: list[str], num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a stage or a module to its end; see `StartedProgram`."""
    return StartedProgram(program, arguments, num_ranks).result()


def ranks_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank on a single node."""
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return of_rank | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def run_module(module: str, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Run `python -m module arguments`. Call this only in a new process."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    # torch reads this variable only when it is imported, and renews its pool of threads after a fork only here
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
    atexit._clear()  # drop the exit functions of the parent process
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # `multiprocessing` does not run them


def read_whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def fake_python(directory: Path, script: str) -> Path:
    """Writes a script that stands in for a Python with an engine."""
    path = directory / "python"
    path.write_text(script)
    path.chmod(0o755)
    return path


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Makes writes beyond this size fail, as they do on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def is_running(pid: int) -> bool:
    """Returns whether a process exists and has not ended. A zombie counts as ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants, as if the node were lost.

    Killing the process group is not enough: torchrun's ranks are in POSIX sessions of their own.
    """
    with suppress(psutil.NoSuchProcess):  # it may have ended
        program = psutil.Process(pid)
        for each in [program, *program.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def wait_until_ended(pid: int, timeout_s: float = 30) -> None:
    """Wait until a process has ended, because a killed process may take a while to end."""
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.05)
