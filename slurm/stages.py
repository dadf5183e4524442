"""Prints the folder of a run, then a line for each stage, in order: its name with underscores, and what runs it.

A stage is run by `ranks`, by one `process`, by one process that queries a `server`, or by one that queries `servers N`,
which N tasks start. The settings are checked first, so that a wrong one is found before anything is queued.

    python slurm/stages.py recipe=llama3_1_8b_mtp train.lr=1e-4
"""

import os
import re
from collections.abc import Mapping, Sequence

from hydra.core.hydra_config import HydraConfig

from mtptrain.cli.program import run_program
from mtptrain.cli.stages import STAGES, stages_of
from mtptrain.config import PipelineConfig
from mtptrain.engines.table import check_exportable, has_format
from mtptrain.training.trainer import check_batch_ranks
from mtptrain.utils.errors import UserError, warn


def check_train_ranks(config: PipelineConfig, nodes: str, ranks_per_node: int) -> None:
    """Raises UserError if a step cannot be divided among the ranks of `nodes`, such as `2`, or any of `1-2`."""
    found = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", nodes)
    numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not numbers:
        raise UserError(f"NODES: must be a number of at least 1, or a range such as 1-2, but is {nodes!r}; correct it")
    for number in numbers:
        check_batch_ranks(config.train.micro_batches_per_step, number * ranks_per_node)


def ranks_of_train(variables: Mapping[str, str]) -> int:
    """Returns the number of ranks of the training job on each node: NPROC_train or else NPROC, or 8 for a word."""
    name = "NPROC_train" if variables.get("NPROC_train") else "NPROC"
    given = variables.get(name) or "gpu"
    if given in ("gpu", "auto", "cpu"):  # torchrun counts on the node
        return 8
    if not re.fullmatch(r"[1-9][0-9]*", given):
        raise UserError(f"{name}: must be a number of at least 1, but is {given!r}; set it, or leave it out")
    return int(given)


def check_skipped(skipped: Sequence[str]) -> None:
    """Raises UserError for a word of SKIP that names no stage. One that the settings leave out may be named."""
    known = [name.replace("-", "_") for name, stage in STAGES.items() if stage.is_needed is not None]
    for word in skipped:
        if word not in known:
            raise UserError(f"SKIP: must name only stages among {' '.join(known)}, but holds {word!r}; correct it")


def main(settings: PipelineConfig) -> None:
    variables = os.environ
    skip = variables.get("MTPTRAIN_SKIP")  # SKIP of pipeline.sh; None in a job
    skipped = (skip or "").split()
    check_skipped(skipped)
    if skip is not None and HydraConfig.get().runtime.choices.get("hardware") == "auto":
        warn(
            "hardware: should be the machine of the jobs, such as hardware=h100_8, but is auto, which follows that of "
            "each job: jobs without GPUs get other settings, such as shorter documents"
        )
    if settings.train.stream and skip is not None and not {"hidden_states", "train"} & set(skipped):
        raise UserError(
            "train.stream: must be false for a chain of jobs, in which training waits for hidden-states to end, but is "
            "true; submit slurm/hidden_states.sbatch and slurm/train.sbatch, so that both run at the same time"
        )
    if skip is not None and "export" not in skipped and has_format(settings.head.name):
        check_exportable(settings)
    num_servers = settings.hidden_states.num_servers
    if num_servers and variables.get("MTPTRAIN_LOCAL_RUN_DIR") == "1":
        raise UserError(
            "hidden_states.num_servers: must be 0 with MTPTRAIN_LOCAL_RUN_DIR=1, as servers share run_dir with the "
            f"job that asks them, but is {num_servers}; leave it out, or put run_dir on a disk that all nodes share"
        )
    if nodes := variables.get("NODES"):
        # pipeline.sh gives the training job this many nodes.
        check_train_ranks(settings, nodes, ranks_of_train(variables))
    lines = [
        f"{name.replace('-', '_')} {f'servers {num_servers}' if name == 'hidden-states' and num_servers else runner}"
        for name, _, runner in stages_of(settings)
        if name != "export" or has_format(settings.head.name)
    ]
    print(settings.run_dir, *lines, sep="\n")


if __name__ == "__main__":
    run_program(main)
