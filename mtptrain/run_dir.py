"""Writes and checks files of a run's folder, which holds every stage's output, resolved config and provenance."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

from mtptrain.config import PipelineConfig
from mtptrain.utils.files import write_json

_RECORDED_PACKAGES = ("mtptrain", "torch", "transformers", "deepspeed", "safetensors", "tokenizers", "datasets")


def write_provenance(stage_dir: Path, config: PipelineConfig) -> None:
    """Write `config.yaml` (resolved) and `provenance.json` (argv, git revision, versions) into a stage's folder."""
    stage_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), stage_dir / "config.yaml")
    provenance = {
        "argv": sys.argv,
        "git_revision": _git_revision(),
        "python": sys.version.split()[0],
        "packages": _versions(),
    }
    write_json(stage_dir / "provenance.json", provenance)


def require(path: Path, program: str) -> Path:
    """Returns `path`, the output of an earlier stage.

    Raises:
        FileNotFoundError: that stage has not been run.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: must exist, but does not; run {program} with the same recipe and run_dir first"
        )
    return path


def _git_revision() -> str | None:
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # git is not installed
        return None
    return result.stdout.strip() or None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # for example mtptrain in a bare checkout
            versions[package] = None
    return versions
