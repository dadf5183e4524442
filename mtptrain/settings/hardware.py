"""Decides which choice of config group `hardware` fits this machine, for `hardware=auto`.

`recipes/hardware/auto.yaml` reads the fields of `this_machine()` as `${this_machine:FIELD}`.
"""

from dataclasses import dataclass

import psutil
import torch

from mtptrain.utils.once import print_once

LARGE_GB = 70
"""Memory from which several GPUs get the batches of `h100_8`."""


@dataclass(frozen=True)
class Machine:
    """Describes the machine that `hardware=auto` follows."""

    hardware: str
    """The name of a file in `recipes/hardware/`."""
    reason: str
    """Why it is this file."""
    num_gpus: int
    """Number of GPUs; 1 on a machine without a GPU, because `planner.num_gpus` counts its CPU as one."""
    memory_gb: int
    """Memory of the smallest GPU, or of the machine if it has no GPU, in units of 10**9 bytes."""


def this_machine() -> Machine:
    """Returns the machine on which this process runs."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        return Machine("cpu", "this machine has no GPU", 1, psutil.virtual_memory().total // 10**9)
    memory_gb = min(torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus)) // 10**9
    hardware = "h100_8" if num_gpus > 1 and memory_gb >= LARGE_GB else "gpu_1"
    found = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return Machine(hardware, f"this machine has {found} of {memory_gb} GB", num_gpus, memory_gb)


def announce_hardware(choice: str | None) -> None:
    """Print what `hardware=auto` stands for, and why, once for all ranks and for all stages of a run.

    Args:
        choice: the chosen file of config group `hardware`.
    """
    if choice == "auto":
        machine = this_machine()
        line = f"hardware: {machine.hardware}, because {machine.reason}; hardware=NAME chooses another"
        print_once(line, "MTPTRAIN_HARDWARE")
