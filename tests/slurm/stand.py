"""Runs Slurm scripts without Slurm, and sets the variables that Slurm would set."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import ROOT

PLAN = """runs/quickstart
responses server
prompts process
hidden_states ranks
train ranks
acceptance ranks
export process
"""


@dataclass(frozen=True)
class Stand:
    """Runs a script of `slurm/` with stand-ins: Slurm's commands record their arguments, and Python prints `PLAN`."""

    directory: Path
    environment: dict[str, str]

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = [ROOT / "slurm" / script, *arguments], {**self.environment, **variables}
        return subprocess.run(command, env=environment, cwd=self.directory, capture_output=True, text=True, check=False)

    def asked(self, command: str) -> list[str]:
        """Returns the arguments of each call of the command."""
        path = self.directory / f"{command}.txt"
        return path.read_text().splitlines() if path.is_file() else []


def array_of(task_ids: str, task: str) -> dict[str, str]:
    first, last = task_ids.split("-")
    names = {"MIN": first, "MAX": last, "COUNT": str(int(last) - int(first) + 1), "ID": task}
    return {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}
