"""The folder of a run: each stage's output beside the resolved config and where it came from."""

import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from omegaconf import OmegaConf

from mtptrain.config import PipelineConfig
from mtptrain.utils.files import write_json

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


def python_module(program: str) -> str:
    """Returns the name by which `python -m` finds a program: in the wheel `data_prep` and `eval` are parts of mtptrain."""
    package = program.split(".")[0]
    found = find_spec(package)
    is_of_this_checkout = (
        found is not None and found.origin is not None and Path(found.origin).parents[1] == Path(__file__).parents[1]
    )
    return program if is_of_this_checkout else f"mtptrain.{program}"


def quoted(path: Path | str) -> str:
    """A path as the value of an override."""
    return "'" + str(path).replace("'", "\\'") + "'"


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
