"""Builds guard.cpp on first use and loads it.

Loading works only before torch is imported, so tests/conftest.py imports this module first.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def _build(torch_dir: Path) -> Path:
    """Returns the path of the library for this version of torch. Compiles the library unless it is cached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mtptrain-tests"
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode() + str(torch_dir).encode()).hexdigest()[:16]
    library = cache / f"guard-{key}.so"
    if not library.exists():
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        if compiler is None:
            raise FileNotFoundError("a C++ compiler must be on PATH, but there is none; install g++")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / library.name
            inputs = [str(SOURCE), f"-I{torch_dir}/include", f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-std=c++20", *inputs, "-o", str(built)], check=True, capture_output=True
            )
            os.replace(built, library)  # another process may be building the library too
    return library


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Returns the library and an empty string, or None and the reason."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_dir = Path(spec.origin).parent
    if (torch_dir / "lib" / "libtorch_cuda.so").exists():
        return None, "this torch is built for CUDA and has a device guard of its own"
    if "torch" in sys.modules:
        return None, "torch was imported before tests.cuda.guard"
    try:
        library = _build(torch_dir)
    except FileNotFoundError as error:
        return None, str(error)
    except subprocess.CalledProcessError as error:
        return None, f"guard.cpp could not be compiled: {error.stderr.decode(errors='replace')[-500:]}"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_dir / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), ""


LIBRARY, WHY_NOT = _load()
