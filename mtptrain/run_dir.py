"""The folder of a run: each stage's output beside the resolved config and where it came from."""

import json
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

from mtptrain.atomic_files import write_text
from mtptrain.config import PipelineConfig

_RECORDED_PACKAGES = ("mtptrain", "torch", "transformers", "deepspeed", "safetensors", "tokenizers", "datasets")


def write_provenance(stage_dir: Path, config: PipelineConfig) -> None:
    """Write `config.yaml` (resolved) and `provenance.json` (argv, git revision, package versions) into a stage's folder."""
    stage_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), stage_dir / "config.yaml")
    provenance = {"argv": sys.argv, "git_revision": _git_revision(), "python": sys.version.split()[0], "packages": _versions()}
    write_json(stage_dir / "provenance.json", provenance)


def command() -> str:
    """How this program was started, one process of it."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join(["python", *([sys.argv[0]] if spec is None else ["-m", spec.name]), *sys.argv[1:]])


def quoted(path: Path | str) -> str:
    """A path as the value of an override."""
    return "'" + str(path).replace("'", "\\'") + "'"


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def require(path: Path, program: str) -> Path:
    """`path`, the output of an earlier stage.

    Raises:
        FileNotFoundError: that stage has not been run.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: must exist, but does not; run {program} with the same recipe and run_dir first")
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
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() or None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a bare checkout, say
            found[package] = None
    return found
