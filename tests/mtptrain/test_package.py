"""Tests what importing the package sets for OpenMP, and that Ctrl-C stops the import, and only the import."""

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


CTRL_C = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
MODULES = {
    "catches": f"try:\n    {CTRL_C}\nexcept KeyboardInterrupt:\n    raise ImportError('half an import') from None",
    "presses": CTRL_C,
}
"""Modules that are interrupted while they are imported. The first treats Ctrl-C as numpy's lazy imports may."""
PROGRAMS = {
    "import that catches it": ("import mtptrain\nimport catches", "stopped by Ctrl-C before anything started\n", 130),
    "code of a user": (f"import mtptrain\ntry:\n    {CTRL_C}\nexcept KeyboardInterrupt:\n    exit(7)", "", 7),
    "import of a started program": (
        "from mtptrain.utils.errors import errors_as_lines\nwith errors_as_lines():\n    import presses",
        "stopped by Ctrl-C; the same command starts again\n",
        130,
    ),
    "handler of a user": (
        "import signal\nsignal.signal(signal.SIGINT, lambda *_: exit(8))\nimport mtptrain, presses",
        "",
        8,
    ),
    "import in a thread": (
        "import threading\nthread = threading.Thread(target=__import__, args=('mtptrain',))\nthread.start()\n"
        "thread.join()\nimport mtptrain, signal\n"
        "exit(9 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)",
        "",
        9,
    ),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_ctrl_c_ends_in_one_line_during_imports_and_is_handled_as_usual_otherwise(tmp_path: Path, case: str) -> None:
    code, stderr, status = PROGRAMS[case]
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (process.stderr, process.returncode) == (stderr, status)
