"""Tests what importing the package sets for OpenMP, and how Ctrl-C stops the import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def openmp_settings(package: str, **variables: str) -> str:
    """Returns the settings that OpenMP prints when `import package` loads it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **variables}
    command = [sys.executable, "-c", f"import {package}"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stderr


@pytest.mark.parametrize("package", ["mtptrain", "data_prep", "eval"])
def test_waiting_threads_give_up_their_core_soon(package: str) -> None:
    assert "GOMP_SPINCOUNT = '1000'" in openmp_settings(package)


def test_what_the_user_sets_stays() -> None:
    assert "GOMP_SPINCOUNT = '77'" in openmp_settings("mtptrain", GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '1000'" not in openmp_settings("mtptrain", OMP_WAIT_POLICY="ACTIVE")


@pytest.mark.parametrize("module", ["mtptrain", "data_prep.prompts"])
def test_ctrl_c_while_torch_is_imported_ends_in_one_line(module: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", module, "prompts"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, "the process ended before Ctrl-C was sent"
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == "stopped by Ctrl-C before anything started\n"
    assert process.returncode == 130
