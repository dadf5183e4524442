"""Finds the versions of mtptrain and of the packages that it computes with, which every output records."""

import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("mtptrain", "torch", "transformers", "deepspeed", "safetensors", "tokenizers", "datasets")


def git_revision() -> str | None:
    """Returns the revision of mtptrain's own checkout; None in a package that is installed, even inside another one."""
    with suppress(FileNotFoundError):  # git is not installed
        command = ["git", "--git-dir=.git", "describe", "--always", "--dirty", "--abbrev=40"]
        root = Path(__file__).parents[2]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def package_versions() -> dict[str, str | None]:
    """Returns the version of each package; None for one that is not installed, such as mtptrain in a bare checkout."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
