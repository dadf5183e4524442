"""Replaces Slurm's commands with scripts that record their arguments."""

from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, environment_without_slurm
from tests.slurm.stand import PLAN, Stand


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    for name in ("sbatch", "srun", "scontrol", "scancel", "sinfo"):
        noted = tmp_path / f"{name}.txt"
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$*" >>{noted}\n[ {name} != sbatch ] || wc -l <{noted}\n')
        (tmp_path / name).chmod(0o755)
    environment = environment_without_slurm()
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "MTPTRAIN_PYTHON": str(tmp_path / "python")}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    environment |= {"MTPTRAIN_CHECKOUT": str(ROOT), "MTPTRAIN_LOCAL_RUN_DIR": "0"}
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat <<'END'\n{PLAN}END\n")
    (tmp_path / "python").chmod(0o755)
    return Stand(tmp_path, environment)
